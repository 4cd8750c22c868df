"""Codecs measured on a model, kept as one file: what the table, the claims and the plot are made from.

measure_codec_table(model) -> CodecTable -> .save("codecs.json") -> CodecTable.load() -> .frame()
"""

import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl

from experiments.environment import describe_environment
from experiments.kvtc import calibration_texts, fit_kvtc
from experiments.quality import CodecQuality, StudyModel, measure_quality, sample_texts
from workbench.codecs import Codec, codec_names
from workbench.errors import InvalidInputError

__all__ = ["COMPARED_CODECS", "EXAMPLE_TABLE", "CodecTable", "measure_codec_table"]

EXAMPLE_TABLE = Path(__file__).parent.parent / "notebooks" / "example_runs" / "codecs.json"

COMPARED_CODECS = (
    *codec_names(),
    "int8(keys='token')",
    "fp8(kind='e5m2')",
    "int4(group=32)",
    "int4(sink_tokens=4)",
    "kivi(bits=2)",
    "kivi(sink_tokens=4)",
    "rotated(bits=3)",
    "turboquant(bits=3)",
    "turboquant(bits=2)",
    "cachegen(key_bins=(64, 32, 32), value_bins=(64, 32, 32))",
    "ecsq(step=0.25)",
    "ecsq(step=0.45)",
    "ecsq(step=0.45, rope_theta=None)",
    "ecsq(step=0.6)",
    "echo(step=0.3)",
    "echo(step=0.6)",
)


@dataclass(frozen=True, slots=True)
class CodecTable:
    """Attributes:
    model: Its spec.
    prefix_tokens, scored_tokens: Of each text.
    rows: One a codec.
    provenance: Machine, versions, commit, load, time.
    """

    model: str
    prefix_tokens: int
    scored_tokens: int
    rows: list[CodecQuality]
    provenance: dict[str, Any]

    def save(self, path: Path) -> None:
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        partial.replace(path)

    @classmethod
    def load(cls, path: Path = EXAMPLE_TABLE) -> "CodecTable":
        """A table from its file; by default the one that comes with the notebooks.

        Raises:
            InvalidInputError: There is no such file, or it holds something else.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            return cls(**found | {"rows": [CodecQuality(**row) for row in found["rows"]]})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidInputError(f"{path} holds no table of codecs: {error}") from error

    @property
    def badge(self) -> str:
        """The line under a plot or a table."""
        texts = len(self.rows[0].kl_by_text) if self.rows else 0
        machine, plural = self.provenance, "" if texts == 1 else "s"
        return (
            f"measured · {self.model}, {texts} text{plural}, {self.prefix_tokens} tokens stored, "
            f"{self.scored_tokens} scored · {machine.get('cpu')}, one thread · {str(machine.get('time'))[:10]}"
        )

    def frame(self) -> pl.DataFrame:
        """One row a codec, the smallest first.

        Returns:
            codec, times_smaller, bits_per_value, kl, kl_interval, nll_change, nll_interval, top1_agreement, key_error,
            value_error, encode_gb_per_s, decode_gb_per_s (of bfloat16, thread CPU time).
        """
        rows = [
            {
                "codec": row.codec,
                "times_smaller": 1 / row.size_fraction,
                **{name: getattr(row, name) for name in _PLAIN},
                "encode_gb_per_s": row.source_nbytes / row.encode_seconds / 1e9,
                "decode_gb_per_s": row.source_nbytes / row.decode_seconds / 1e9,
            }
            for row in self.rows
        ]
        names = ("times_smaller", *_PLAIN, "encode_gb_per_s", "decode_gb_per_s")
        schema = {"codec": pl.String, **dict.fromkeys(names, pl.Float64)}
        return pl.DataFrame(rows, schema=schema).sort("bits_per_value", "codec")


_PLAIN = ("bits_per_value", "kl", "kl_interval", "nll_change", "nll_interval", "top1_agreement", "key_error",
          "value_error")  # fmt: skip


def measure_codec_table(
    model: str = "smollm2",
    codecs: Iterable[Codec | str] = COMPARED_CODECS,
    *,
    texts: int = 5,
    prefix_tokens: int = 1024,
    scored_tokens: int = 256,
    calibrated: bool = False,
    watch: Callable[[str, int, int], None] | None = None,
) -> CodecTable:
    """Send a model's prefixes through codecs; see `experiments.quality.measure_quality`.

    Args:
        texts: How many of the sample texts.
        calibrated: Learn a KVTC-like codec from other texts first and measure it too; see `experiments.kvtc`.
    """
    chosen = dict(list(sample_texts().items())[:texts])
    sizes = {"prefix_tokens": prefix_tokens, "scored_tokens": scored_tokens}
    study = StudyModel(model)
    with tempfile.TemporaryDirectory() as folder:
        learned = [fit_kvtc(study, calibration_texts(), Path(folder, "kvtc.npz"))] if calibrated else []
        rows = measure_quality(study, [*codecs, *learned], texts=chosen, watch=watch, **sizes)
    return CodecTable(model, prefix_tokens, scored_tokens, rows, describe_environment())

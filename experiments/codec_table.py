"""Codecs measured on a model, kept as one file: what the table, the claims and the plot are made from.

measure_codec_table(model) -> CodecTable -> .save("codecs.json") -> CodecTable.load() -> .frame()
"""

import contextlib
import json
import tempfile
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl

from experiments.environment import describe_environment
from experiments.kvtc import calibration_texts, fit_kvtc
from experiments.quality import CodecQuality, StudyModel, measure_quality, sample_texts
from experiments.recall import Tasks, recall_tasks
from experiments.references import references
from workbench.codecs import Codec, codec_names
from workbench.errors import InvalidInputError

__all__ = ["COMPARED_CODECS", "EXAMPLE_TABLE", "SECOND_TABLE", "CodecTable", "measure_codec_table"]

EXAMPLE_TABLE = Path(__file__).parent.parent / "notebooks" / "example_runs" / "codecs.json"
SECOND_TABLE = EXAMPLE_TABLE.with_name("codecs_second_model.json")

_GREEDY_TOKENS = 64
_TEXTS_ASKED = 3  # 12 needles and 20 pairs

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
    "echo(focus=0)",
)


@dataclass(frozen=True, slots=True)
class CodecTable:
    """Attributes:
    model: Its spec.
    prefix_tokens, scored_tokens: Of each text.
    rows: One a codec, or another library's method.
    provenance: Machine, versions, commit, load, time; `earlier`: of rows that were measured before the newest.
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

    def joined(self, newer: "CodecTable") -> "CodecTable":
        """This table with the rows of a newer one, which take the place of those of the same codecs.

        Raises:
            InvalidInputError: See `require_same`.
        """
        self.require_same(newer.model, len(newer._texts), newer.prefix_tokens, newer.scored_tokens)
        rows = {row.codec: row for row in (*self.rows, *newer.rows)}
        before = {name: value for name, value in self.provenance.items() if name != "earlier"}
        earlier = [*self.provenance.get("earlier", []), before]
        return replace(newer, rows=list(rows.values()), provenance={**newer.provenance, "earlier": earlier})

    def require_same(self, model: str, texts: int, prefix_tokens: int, scored_tokens: int) -> None:
        """Raises InvalidInputError if rows measured so do not belong into this table."""
        here = (self.model, len(self._texts), self.prefix_tokens, self.scored_tokens)
        if here != (model, texts, prefix_tokens, scored_tokens):
            names = ("model", "texts", "prefix tokens", "scored tokens")
            said = [", ".join(f"{name} {value}" for name, value in zip(names, about, strict=True))
                    for about in (here, (model, texts, prefix_tokens, scored_tokens))]  # fmt: skip
            raise InvalidInputError(f"the table is of {said[0]}; rows of {said[1]} do not belong there")

    @property
    def _texts(self) -> list[str]:
        return sorted(self.rows[0].kl_by_text) if self.rows else []

    @property
    def badge(self) -> str:
        """The line under a plot or a table."""
        texts = len(self._texts)
        machine, plural = self.provenance, "" if texts == 1 else "s"
        return (
            f"measured · {self.model}, {texts} text{plural}, {self.prefix_tokens} tokens stored, "
            f"{self.scored_tokens} scored · {machine.get('cpu')}, one thread · {str(machine.get('time'))[:10]}"
        )

    def frame(self) -> pl.DataFrame:
        """One row a codec, the smallest first.

        Returns:
            model, codec, times_smaller, bits_per_value, kl, kl_interval, nll_change, nll_interval, top1_agreement,
            greedy_tokens, needle_recall, key_value_recall, key_error, value_error, encode_gb_per_s, decode_gb_per_s (of
            bfloat16, thread CPU time), own (one of this project's codecs). None where a figure does not apply.
        """
        rows = [
            {
                "model": self.model,
                "codec": row.codec,
                "times_smaller": 1 / row.size_fraction,
                **{name: getattr(row, name) for name in _PLAIN},
                "encode_gb_per_s": _speed(row, row.encode_seconds),
                "decode_gb_per_s": _speed(row, row.decode_seconds),
                "own": not row.codec.startswith(("quantized_cache(", "kvpress(")),
            }
            for row in self.rows
        ]
        names = ("times_smaller", *_PLAIN, "encode_gb_per_s", "decode_gb_per_s")
        schema = {"model": pl.String, "codec": pl.String, **dict.fromkeys(names, pl.Float64), "own": pl.Boolean}
        return pl.DataFrame(rows, schema=schema).sort("bits_per_value", "codec")


_PLAIN = ("bits_per_value", "kl", "kl_interval", "nll_change", "nll_interval", "top1_agreement", "greedy_tokens",
          "needle_recall", "key_value_recall", "key_error", "value_error")  # fmt: skip


def _speed(row: CodecQuality, seconds: float | None) -> float | None:
    return row.source_nbytes / seconds / 1e9 if seconds else None


def measure_codec_table(
    model: str = "smollm2",
    codecs: Iterable[Codec | str] = COMPARED_CODECS,
    *,
    texts: int = 5,
    prefix_tokens: int = 1024,
    scored_tokens: int = 256,
    also: Collection[str] = ("tasks",),
    watch: Callable[[str, int, int], None] | None = None,
) -> CodecTable:
    """Send a model's prefixes through codecs; see `experiments.quality.measure_quality`.

    Args:
        texts: How many of the sample texts.
        also: "tasks": greedy continuations and recall; "calibrated": learn a KVTC-like codec from other texts first
            and measure it, too (`experiments.kvtc`); "references": other libraries (`experiments.references`).

    Raises:
        PeerError: Of references, where they cannot be measured.
    """
    if unknown := set(also) - {"tasks", "calibrated", "references"}:
        raise InvalidInputError(f"also names {sorted(unknown)}; allowed: tasks, calibrated, references")
    chosen = dict(list(sample_texts().items())[:texts])
    provenance = describe_environment()
    with contextlib.ExitStack() as stack:
        others = []
        if "references" in also:
            others, provenance["references"] = stack.enter_context(references(model))
        study = StudyModel(model)
        if "calibrated" in also:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            others = [fit_kvtc(study, calibration_texts(), Path(folder, "kvtc.npz")), *others]
        tasks = Tasks()
        if "tasks" in also:
            asked = list(chosen.values())[:_TEXTS_ASKED]
            tasks = Tasks(_GREEDY_TOKENS, recall_tasks(study.tokenizer, asked, tokens=prefix_tokens))
        sizes = {"prefix_tokens": prefix_tokens, "scored_tokens": scored_tokens}
        rows = measure_quality(study, [*codecs, *others], texts=chosen, tasks=tasks, watch=watch, **sizes)
    return CodecTable(model, prefix_tokens, scored_tokens, rows, provenance)

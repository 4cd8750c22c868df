"""Published claims about smaller KV, each with our figure on a real model and a verdict from the numbers.

    CodecTable -> one figure a claim -> experiments.claims.verdict_of -> compression_claims()

The rule is that of `experiments.claims`: within a quarter of the published number is "reproduced", the same direction
and at least half the effect "reproduced in shape".
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import polars as pl

from experiments.claims import Published, figure_text, verdict_of
from experiments.codec_table import CodecTable
from experiments.quality import CodecQuality

__all__ = ["CLAIMS", "CompressionClaim", "compression_claims"]

Rows = dict[str, CodecQuality]


@dataclass(frozen=True)
class CompressionClaim:
    """Attributes:
    says: The claim in words; `source` says whose.
    parameters: Of the method as published.
    published: The number, or the bound that the words mean.
    codecs: Measured codecs that the figure needs.
    figure: The figure from their rows; None where nothing here can test it.
    how: What differs from the original, or why it cannot be tested.
    """

    name: str
    source: str
    says: str
    parameters: str
    published: Published
    codecs: tuple[str, ...] = ()
    figure: Callable[[Rows], float] | None = None
    how: str = ""


def _size(codec: str) -> Callable[[Rows], float]:
    return lambda rows: 1 / rows[codec].size_fraction


def _kl_over(codec: str, other: str) -> Callable[[Rows], float]:
    return lambda rows: rows[codec].kl / rows[other].kl


def _error_over(codec: str, other: str) -> Callable[[Rows], float]:
    return lambda rows: rows[codec].key_error / rows[other].key_error


def _perplexity_rise(codec: str) -> Callable[[Rows], float]:
    return lambda rows: math.expm1(rows[codec].nll_change)


def _top1_lost(codec: str) -> Callable[[Rows], float]:
    return lambda rows: 1 - rows[codec].top1_agreement


_LESS = Published(0, 1, "times", "most", neutral=1.0)  # "has less": a factor below one
_NO_GROUND = "Needs a task benchmark on a model of some billion parameters; a GPU."

CLAIMS = (
    CompressionClaim(
        "kivi_channel_keys", "KIVI, arXiv:2402.02750",
        "Keys belong quantised per channel, not per token.",
        "4 bits, groups of 32", Published(0, 0.5, "times", "most", neutral=1.0),
        ("kivi", "int4(group=32)"), _error_over("kivi", "int4(group=32)"),
        "Read as half the relative error of the keys, at equal bits.",
    ),
    CompressionClaim(
        "kivi_2_bit", "KIVI, arXiv:2402.02750", "Two bits keep almost the same quality.",
        "2 bits, groups of 32, 128 recent tokens whole", Published(0, 0.05, "share", "most"),
        ("kivi(bits=2)",), _perplexity_rise("kivi(bits=2)"),
        "Read as perplexity up 5 % at most. A stored prefix has no recent tokens that stay whole.",
    ),
    CompressionClaim(
        "turboquant_4_bit", "TurboQuant, arXiv:2504.19874", "Neutral quality at 3.5 bits.",
        "random rotation, Lloyd-Max levels", Published(0, 0.01, "share", "most"),
        ("turboquant",), _perplexity_rise("turboquant"),
        "Read as perplexity up 1 % at most; at 4 bits and a norm, more than was claimed for.",
    ),
    CompressionClaim(
        "three_bit_cliff", "vLLM and Red Hat, KV cache study, 2026-05",
        "Quality falls off a cliff from four bits to three.",
        "TurboQuant, 3 against 4 bits", Published(3, 99, "times", "least", neutral=1.0),
        ("turboquant(bits=3)", "turboquant"), _kl_over("turboquant(bits=3)", "turboquant"),
        "Read as three times the KL.",
    ),
    CompressionClaim(
        "turboquant_mse", "TurboQuant, arXiv:2504.19874",
        "Mean squared error 0.009 of the energy at 4 bits, 0.117 at 2: 13 times as much for two bits.",
        "random rotation, Lloyd-Max levels", Published(13, 13, "times", neutral=1.0),
        ("turboquant(bits=2)", "turboquant"),
        lambda rows: (rows["turboquant(bits=2)"].key_error / rows["turboquant"].key_error) ** 2,
    ),
    CompressionClaim(
        "rotation", "QuaRot, arXiv:2404.00456", "A Hadamard rotation evens out outliers: less loss at equal bits.",
        "4 bits, groups of 64", _LESS, ("rotated", "int4"), _kl_over("rotated", "int4"), "KL over KL without rotation.",
    ),
    CompressionClaim(
        "pre_rope", "KVQuant, arXiv:2401.18079", "Keys quantised before the rotary embedding lose less.",
        "3 to 4 bits, per channel", _LESS, ("ecsq(step=0.45, rope_theta=None)", "ecsq(step=0.45)"),
        _kl_over("ecsq(step=0.45, rope_theta=None)", "ecsq(step=0.45)"), "With ECSQ, at equal bits.",
    ),
    CompressionClaim(
        "fp8_lossless", "vLLM and Red Hat, KV cache study, 2026-05", "fp8 loses next to nothing.",
        "e4m3", Published(0, 0.01, "share", "most"), ("fp8",), _top1_lost("fp8"),
        "Read as 1 % of the top tokens changed at most; ours has a scale a token and head.",
    ),
    CompressionClaim(
        "int8_under_fp8", "vLLM pull request 38378", "Eight-bit integers with a scale a token and head match fp8.",
        "int8_per_token_head", _LESS, ("int8(keys='token')", "fp8"), _kl_over("int8(keys='token')", "fp8"),
    ),
    CompressionClaim(
        "cachegen_size", "CacheGen, arXiv:2310.07240", "3.5 to 4.3 times smaller than 8-bit KV.",
        "bins by layer, deltas, arithmetic coder", Published(3.5, 4.3, "times", neutral=1.0),
        ("cachegen",), lambda rows: 0.5 / rows["cachegen"].size_fraction, "Without deltas; rANS.",
    ),
    CompressionClaim(
        "cachegen_quality", "CacheGen, arXiv:2310.07240", "A negligible loss.",
        "bins by layer, deltas, arithmetic coder", Published(0, 0.02, "share", "most"),
        ("cachegen",), _perplexity_rise("cachegen"), "Read as perplexity up 2 % at most.",
    ),
    CompressionClaim(
        "zipnn_saving", "ZipNN, arXiv:2411.05239", "About 33 % less for bfloat16 without loss.", "exponents coded",
        Published(0.33, 0.33, "share"), ("lossless",), lambda rows: 1 - rows["lossless"].size_fraction,
        "Published for weights; ours are keys and values.",
    ),
    CompressionClaim(
        "sinks", "StreamingLLM, arXiv:2309.17453", "The first four tokens matter most: kept whole, the loss falls.",
        "4 tokens", _LESS, ("kivi(sink_tokens=4)", "kivi"), _kl_over("kivi(sink_tokens=4)", "kivi"),
        "Published for eviction; here they stay whole while the rest has 4 bits.",
    ),
    CompressionClaim(
        "kvtc_size", "KVTC, arXiv:2511.01815", "16 to 20 times smaller within one point of accuracy: the size.",
        "PCA over all layers, 160k calibration tokens", Published(16, 20, "times", neutral=1.0),
        ("kvtc",), _size("kvtc"),
        "PCA over six layers at a time, 9,216 calibration tokens.",
    ),
    CompressionClaim(
        "kvtc_quality", "KVTC, arXiv:2511.01815", "16 to 20 times smaller within one point of accuracy: the quality.",
        "PCA over all layers, 160k calibration tokens", Published(0, 0.02, "nats", "most"),
        ("kvtc",), lambda rows: _mean_kl(rows["kvtc"], code=False),
        "Read as KL of 0.02 at most, on text of the calibration's kind (reference prose), at the size above.",
    ),
    CompressionClaim(
        "kvtc_other_text", "KVTC, arXiv:2511.01815", "One calibration serves text of other kinds.",
        "PCA over all layers, 160k calibration tokens", Published(0, 0.02, "nats", "most"),
        ("kvtc",), lambda rows: _mean_kl(rows["kvtc"], code=True),
        "The same on source code, calibrated on reference prose alone; the authors calibrate on a wide mixture.",
    ),
    CompressionClaim(
        "kvzip", "KVzip, arXiv:2505.23416", "Selection without the query keeps quality at 3 to 4 times smaller.",
        "30 % of the pairs kept", Published(3, 4, "times", neutral=1.0), (), None,
        "Evicts pairs head by head: pages of an engine cannot have holes. `selected` shows what leaving out costs.",
    ),
    CompressionClaim(
        "kvtc_ttft", "KVTC, arXiv:2511.01815", "TTFT up to 8 times shorter at 8,000 tokens.", "H100, nvCOMP",
        Published(8, 8, "times", neutral=1.0), (), None, "Needs a GPU.",
    ),
    CompressionClaim(
        "int4_tasks", "vLLM pull request 38378", "GSM8K unchanged with 4-bit KV per token and head.",
        "Qwen3.5-35B", Published(0, 0.01, "share", "most"), (), None, _NO_GROUND,
    ),
    CompressionClaim(
        "nvfp4", "NVIDIA, NVFP4 KV cache", "Half of fp8's bytes at less than 1 % loss, better than MXFP4.",
        "blocks of 16, e4m3 scales", Published(0, 0.01, "share", "most"), (), None, "Needs Blackwell's number format.",
    ),
)  # fmt: skip


def _mean_kl(row: CodecQuality, *, code: bool) -> float:
    """KL over the texts that are source code, or over those that are not."""
    found = [kl for text, kl in row.kl_by_text.items() if text.endswith(".py") == code]
    return sum(found) / len(found) if found else math.nan


def compression_claims(table: CodecTable) -> pl.DataFrame:
    """One row a claim: claim, source, says, parameters, published, measured, verdict, how.

    Args:
        table: Measured codecs; a claim whose codecs are not in it is "not measured yet".
    """
    rows = {_key(row.codec): row for row in table.rows}
    return pl.DataFrame(
        [_row(claim, rows) for claim in CLAIMS], schema=dict.fromkeys(_COLUMNS, pl.String), orient="row"
    )


_COLUMNS = ("claim", "source", "says", "parameters", "published", "measured", "verdict", "how")


def _key(codec: str) -> str:
    """A codec's repr; of one made here from calibration, its name alone: its file differs from run to run."""
    return "kvtc" if codec.startswith("kvtc(") else codec


def _row(claim: CompressionClaim, rows: Rows) -> tuple[str, ...]:
    missing = [codec for codec in claim.codecs if codec not in rows]
    measured, how = "–", claim.how
    if claim.figure is None:
        verdict = "not testable here"
    elif missing:
        verdict, how = "not measured yet", f"the table has no {', '.join(missing)}"
    else:
        figure = claim.figure(rows)
        measured, verdict = figure_text(figure, claim.published.unit), verdict_of(claim.published, figure)
    return claim.name, claim.source, claim.says, claim.parameters, str(claim.published), measured, verdict, how

"""Where compression pays: real vLLM, one engine a codec, its KV behind a link of a chosen bandwidth.

    engines (one a codec) -> the document's first question stores its KV -> further questions, each at every bandwidth,
    rotating through the engines -> one row a question

    links = codec_links("smollm2", codecs=("raw", "int8", "ecsq"), gbits=(0.3, 1, 10))
    plot_ttft_by_bandwidth(ttft_by_bandwidth_data(links.frame), badge=links.badge)

The link is a relay on this machine (experiments/links.py) in front of a real Redis; memory and disk have none.
"""

import itertools
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from experiments.arms import arm_by_name, ready
from experiments.links import GBIT, LimitedLink
from experiments.models import ModelSource, resolve_model
from experiments.provenance import provenance
from experiments.serving import EngineProcess
from experiments.workloads.long_document import long_document
from workbench.codecs import resolve_codec
from workbench.errors import InvalidInputError

__all__ = ["EXAMPLE_LINKS", "NO_CACHE", "CodecLinks", "codec_links"]

EXAMPLE_LINKS = Path(__file__).parent.parent / "notebooks" / "example_runs" / "codec_links.json"

NO_CACHE = "no reuse"
_SHORT_PROMPT = np.arange(1, 40)  # less than a chunk: an engine's step that stores and finds nothing
_SCHEMA = {
    "codec": pl.String, "place": pl.String, "gbit_per_s": pl.Float64, "question": pl.Int64, "prompt_tokens": pl.Int64,
    "hit_tokens": pl.Int64, "ttft_s": pl.Float64, "first_token_equal": pl.Boolean,
}  # fmt: skip


@dataclass(frozen=True)
class CodecLinks:
    """Measured requests and where they come from.

    Attributes:
        frame: One row a question and codec: codec ("no reuse" for vLLM alone), place, gbit_per_s (infinite without a
            link), question, prompt_tokens, hit_tokens, ttft_s, and first_token_equal: to the answer without reuse.
        badge: Machine, version and day.
        model: What was served.
    """

    frame: pl.DataFrame
    badge: str
    model: str

    def save(self, path: Path) -> None:
        """Write everything as JSON."""
        rows = [row | {"gbit_per_s": str(row["gbit_per_s"])} for row in self.frame.to_dicts()]  # JSON has no infinity
        path.write_text(json.dumps({"badge": self.badge, "model": self.model, "rows": rows}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path = EXAMPLE_LINKS) -> "CodecLinks":
        """What `save` wrote; by default what comes with the notebooks.

        Raises:
            InvalidInputError: There is no such file, or it holds something else.
        """
        try:
            found = json.loads(path.read_text())
            rows = [row | {"gbit_per_s": float(row["gbit_per_s"])} for row in found["rows"]]
            return cls(pl.DataFrame(rows, schema=_SCHEMA), found["badge"], found["model"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidInputError(f"{path} holds no measured links: {error}") from error


@dataclass
class _Line:
    """One engine of the comparison, and what lies between it and its KV."""

    codec: str
    engine: EngineProcess
    link: LimitedLink | None


def codec_links(model: str | Path | ModelSource = "smollm2", *,
                codecs: Sequence[str] = ("raw", "lossless", "int8", "int4", "ecsq"),
                place: str = "redis", gbits: Sequence[float] = (0.3, 1.0, 10.0), document_tokens: int = 2000,
                repeats: int = 3, threads: int = 0, seed: int = 0,
                watch: Callable[[str], None] = lambda _: None) -> CodecLinks:  # fmt: skip
    """TTFT of repeated long prompts under each codec, at each bandwidth of the link.

    Args:
        model: What `resolve_model` takes.
        codecs: Names of codecs; "raw" is none.
        place: Where the KV lies: "memory", "disk" (from the system's cache) or "redis", behind the link.
        gbits: Bandwidths in Gbit/s; only for Redis.
        document_tokens: Length of the document that is asked about again and again.
        repeats: Questions at each bandwidth.
        threads: Compute threads of each engine; all cores by default.
        seed: Chooses document and questions.
        watch: Told what happens.

    Raises:
        InvalidInputError: A place that is none of these.
    """
    if place not in ("memory", "disk", "redis"):
        raise InvalidInputError(f"place is {place!r}; allowed are memory, disk, redis")
    source = model if isinstance(model, ModelSource) else resolve_model(model)
    speeds = tuple(gbits) if place == "redis" else (math.inf,)
    requests = _questions(source, document_tokens, 1 + repeats * len(speeds), seed)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="kvworkbench-links-") as folder, ExitStack() as stack:
        lines = [*_start(stack, Path(folder), source, codecs, place, threads, max(map(len, requests)), watch)]
        for line in lines:
            watch(f"{line.codec}: first question")
            _store(line, requests[0])
        order = itertools.cycle(range(len(lines)))
        numbered = itertools.chain.from_iterable((speed,) * repeats for speed in speeds)
        for question, speed in enumerate(numbered, 1):
            first = next(order)
            for line in lines[first:] + lines[:first]:
                watch(f"{line.codec}: question {question} at {speed:g} Gbit/s")
                rows.append(_ask(line, requests[question], question, speed))
    reference = {row["question"]: row["first"] for row in rows if row["codec"] == NO_CACHE}
    for row in rows:
        row |= {"place": place, "first_token_equal": row["first"] == reference[row["question"]]}
    return CodecLinks(pl.DataFrame(rows, schema=_SCHEMA, strict=False), provenance("measured"), source.name)


def _questions(source: ModelSource, document_tokens: int, count: int, seed: int) -> list[np.ndarray]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(source.path))
    workload = long_document(tokenizer, groups=1, documents_per_group=1, document_tokens=document_tokens,
                             questions=count, max_tokens=1, seed=seed)  # fmt: skip
    return [request.token_ids for request in workload.requests]


def _start(stack: ExitStack, folder: Path, source: ModelSource, codecs: Sequence[str], place: str, threads: int,
           longest: int, watch: Callable[[str], None]) -> Iterator[_Line]:  # fmt: skip
    """Engines without prefix cache of vLLM's own: what is measured is the load."""
    length = -(-(longest + 64) // 32) * 32
    vllm = {"max_model_len": length, "kv_cache_memory_bytes": 2 * length * (source.bytes_per_token or 1 << 16)}
    for codec in (NO_CACHE, *map(repr, map(resolve_codec, codecs))):
        watch(f"{codec}: starting vLLM")
        own = folder / f"engine-{len(list(folder.iterdir()))}"
        own.mkdir()
        link, cache = None, None
        if codec != NO_CACHE:
            cache = _settings(place, codec, own)
        if cache is not None and place == "redis":
            redis = stack.enter_context(ready(arm_by_name("redis"), own))
            port = int(str(redis.cache["redis_url"]).rpartition(":")[2].partition("/")[0])
            link = stack.enter_context(LimitedLink(port=port, bytes_per_second=math.inf))
            cache["redis_url"] = f"redis://127.0.0.1:{link.port}/0"
        engine = EngineProcess(str(source.path), cache=cache, threads=threads, vllm=vllm)
        yield _Line(codec, stack.enter_context(engine), link)


def _settings(place: str, codec: str, folder: Path) -> dict[str, Any]:
    if place == "memory":
        return {"memory_bytes": "1GiB", "memory_codec": codec}
    below = {"memory_bytes": 0, "codec": codec}
    return below | ({"disk_path": str(folder / "kv")} if place == "disk" else {"redis_timeout_seconds": 5.0})


def _store(line: _Line, prompt: np.ndarray) -> None:
    """Ask the document's first question, and once more until all of its chunks are found."""
    found, deadline = -1, time.monotonic() + 60
    while time.monotonic() < deadline:
        answer = line.engine.generate(prompt, max_tokens=1)
        if line.codec == NO_CACHE or answer["cached_tokens"] == found > 0:
            return
        found = answer["cached_tokens"]
        time.sleep(0.5)
        line.engine.generate(_SHORT_PROMPT, max_tokens=1)  # a step in which the engine hears what was written


def _ask(line: _Line, prompt: np.ndarray, question: int, gbit: float) -> dict[str, Any]:
    if line.link is not None:
        line.link.bytes_per_second = gbit * GBIT
    answer = line.engine.generate(prompt, max_tokens=1)
    return {"codec": line.codec, "gbit_per_s": gbit, "question": question, "prompt_tokens": len(prompt),
            "hit_tokens": answer["cached_tokens"], "ttft_s": answer["ttft_s"],
            "first": answer["token_ids"][0]}  # fmt: skip

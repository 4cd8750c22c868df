"""Published tables recomputed: the printed value beside ours, and how many of its digits agree.

    reproduce("kvcache_simulator")  ->  a frame with published, recomputed, digits, agreeing_digits

Each function below is one table; its docstring says which definition it takes. mooncake_table1 is here because it does
not reproduce: the trace behind it was never published.
"""

from collections.abc import Callable

import numpy as np
import polars as pl

from experiments import published_tables as published
from experiments.curves import lru_curve
from experiments.peer_tables import LIVE_TABLES
from experiments.replay import replay
from experiments.traces import Trace, find_trace, load_trace, zipf
from workbench.errors import UnknownNameError

__all__ = ["TABLES", "agreeing_digits", "reproduce"]


def reproduce(name: str, *, live: bool = False) -> pl.DataFrame:
    """Recompute a published table.

    Args:
        name: One of TABLES.
        live: Run the peer itself now instead of taking what it once gave; for LIVE_TABLES.

    Returns:
        trace, what, capacity (as published), published, recomputed, gap, digits (printed) and agreeing_digits.

    Raises:
        UnknownNameError: No such table, or none that can be run live.
        InvalidInputError: Its trace, or the peer, is not on this machine.
    """
    tables = LIVE_TABLES if live else TABLES
    if name not in tables:
        raise UnknownNameError("live table" if live else "table", name, tables)
    rows = tables[name]()
    frame = pl.DataFrame(
        rows, ["trace", "what", "capacity", "published", "recomputed"], orient="row", infer_schema_length=None
    )
    digits = [len(text.partition(".")[2]) for text in frame["published"]]
    agreeing = [
        agreeing_digits(text, value) for text, value in zip(frame["published"], frame["recomputed"], strict=True)
    ]
    return frame.with_columns(
        pl.col("recomputed").sub(pl.col("published").cast(pl.Float64)).alias("gap"),
        pl.Series("digits", digits, pl.Int64),
        pl.Series("agreeing_digits", agreeing, pl.Int64),
    )


def agreeing_digits(printed: str, value: float) -> int:
    """Decimals of a printed number that the value rounds to: 0.0449 and 0.0443 agree in 2 (0.04 of both).

    At most the decimals printed; -1 if not even the whole numbers agree.
    """
    decimals = len(printed.partition(".")[2])
    for digits in range(decimals, -1, -1):
        if abs(round(float(printed), digits) - round(value, digits)) < 0.5 * 10.0**-digits:
            return digits
    return -1


Rows = list[tuple[str, str, str, str, float]]


def _kvcache_simulator() -> Rows:
    """Second half of the requests, by tokens. FIFO in object semantics, counting the contiguous prefix."""
    rows: Rows = []
    for name, (capacities, table) in published.KVCACHE_SIMULATOR.items():
        trace = load_trace(name)
        for policy, values in table.items():
            semantics = "object" if policy == "fifo" else "prefix"
            for capacity, value in zip(capacities, values.split(), strict=True):
                ours = replay(trace, policy, capacity_chunks=capacity, semantics=semantics)
                rows.append((name, policy, f"{capacity} blocks", value, ours.second_half()))
    return rows


def _llmtrafficlens() -> Rows:
    """Second half, percent of tokens, LRU block by block in order; K and M are powers of two."""
    trace = load_trace("mooncake_conversation")
    rows: Rows = []
    for label, value in published.LLMTRAFFICLENS.items():
        tokens = (
            int(label[:-1]) << (10 if label.endswith("K") else 20) if label != "unlimited" else trace.distinct * 512
        )
        ours = replay(trace, "lru", capacity_chunks=tokens // 512, semantics="object")
        rows.append((trace.name, "lru", label, value, 100 * ours.second_half()))
    return rows


def _kv_cache_tester() -> Rows:
    """Consecutive requests of each session's main thread; quantiles over sessions of the public subset."""
    path, _ = find_trace("weka_claude_code")
    with np.load(path, allow_pickle=False) as packed:
        rows, ids, offsets = packed["rows"], packed["ids"], packed["off"]
    main = np.flatnonzero(rows[:, 1] == 0)
    shares = consecutive_overlap(ids, offsets, main, rows[main, 0].astype(np.int64))
    ours: dict[str, float] = dict(
        zip(("min", "P25", "median", "P75", "max"), np.percentile(shares, (0, 25, 50, 75, 100)), strict=True)
    )
    ours["mean"] = shares.mean()
    return [
        ("weka_claude_code", key, "", value, 100 * float(ours[key])) for key, value in published.KV_CACHE_TESTER.items()
    ]


def consecutive_overlap(ids: np.ndarray, offsets: np.ndarray, requests: np.ndarray, sessions: np.ndarray) -> np.ndarray:
    """Blocks that the session's previous request had / blocks, for each session with blocks.

    Args:
        ids, offsets: Block ids of all requests, as in Trace.
        requests: The requests to count, in order.
        sessions: The session of each of them.
    """
    found = np.zeros(int(sessions.max()) + 1)
    total = np.zeros_like(found)
    before: dict[int, np.ndarray] = {}
    for q, session in zip(requests.tolist(), sessions.tolist(), strict=True):
        blocks = ids[offsets[q] : offsets[q + 1]]
        if session in before:
            found[session] += np.isin(blocks, before[session], assume_unique=True).sum()
        total[session] += len(blocks)
        before[session] = blocks
    return found[total > 0] / total[total > 0]


def _mooncake_figure9() -> Rows:
    """LRU block by block in order, by tokens, plus a credit for what 512-token ids hide.

    A request that is hit in part would on average be hit for half a block more; where only block 0 hits, 368 tokens
    (fitted on the point at 1e5 tokens of the conversation trace: its system prompt ends there).
    """
    rows: Rows = []
    for name in ("mooncake_conversation", "mooncake_synthetic"):
        trace = load_trace(name)
        for tokens, value in zip(published.FIGURE9["tokens"], published.FIGURE9[name].split(), strict=True):
            ours = replay(trace, "lru", capacity_chunks=tokens // 512, semantics="object")
            chunks = ours.leading_chunks
            partly = (chunks > 0) & (chunks < trace.lengths)
            credit = np.where(partly, 256, 0)
            if name == "mooncake_conversation":
                credit = np.where(partly & (chunks == 1), 368, credit)
            hits = np.minimum(ours.hit_tokens + credit, trace.input_tokens)
            rows.append((name, "lru + credit", f"{tokens:.0e} tokens", value, hits.sum() / trace.input_tokens.sum()))
    return rows


def _libcachesim() -> Rows:
    """Miss ratio of every policy that has a reference value, on both Mooncake traces."""
    rows: Rows = []
    for name, (capacities, table) in published.LIBCACHESIM.items():
        trace = load_trace(name)
        rows += _miss_ratios(trace, capacities, table)
    return rows


def _libcachesim_zipf() -> Rows:
    """Miss ratio on the generated Zipf trace."""
    capacities, table = published.LIBCACHESIM_ZIPF
    return _miss_ratios(zipf(), capacities, table)


def _miss_ratios(trace: Trace, capacities: tuple[int, ...], table: dict[str, str]) -> Rows:
    rows: Rows = []
    for policy, values in table.items():
        for capacity, value in zip(capacities, values.split(), strict=True):
            ours = replay(trace, policy, capacity_chunks=capacity, semantics="object")
            rows.append((trace.name, policy, f"{capacity} blocks", value, 1 - ours.hit_rate_by_chunks))
    return rows


def _mooncake_table1() -> Rows:
    """Not reproduced: the trace of the paper is not public. What the two public traces give under its rules."""
    rows: Rows = []
    for name in ("mooncake_conversation", "mooncake_synthetic"):
        trace = load_trace(name)
        curve = lru_curve(trace)
        for policy in ("lru", "lfu", "length_aware"):
            values = published.MOONCAKE_TABLE1[policy].split()
            for capacity, value in zip(published.MOONCAKE_TABLE1["capacities"], values, strict=True):
                if capacity is None:
                    ours = float(curve.hit_rate(len(curve.hits) - 1))
                else:
                    ours = replay(trace, policy, capacity_chunks=capacity).hit_rate_by_chunks
                rows.append((name, policy, "no limit" if capacity is None else f"{capacity} blocks", value, ours))
    return rows


TABLES: dict[str, Callable[[], Rows]] = {
    "kvcache_simulator": _kvcache_simulator,
    "llmtrafficlens": _llmtrafficlens,
    "kv_cache_tester": _kv_cache_tester,
    "mooncake_figure9": _mooncake_figure9,
    "libcachesim": _libcachesim,
    "libcachesim_zipf": _libcachesim_zipf,
    "mooncake_table1": _mooncake_table1,
}

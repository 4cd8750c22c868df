"""Tables from running the peers themselves, beside our replay of the same trace: kvcache-simulator and libcachesim.

Both are optional packages. A row is (trace, policy, capacity, the peer's value to six digits, ours).
"""

import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path

from experiments.published_tables import KVCACHE_SIMULATOR, LIBCACHESIM
from experiments.replay import replay
from experiments.traces import find_trace, load_trace, to_oracle_general
from workbench.errors import InvalidInputError

__all__ = ["LIVE_TABLES"]

Rows = list[tuple[str, str, str, str, float]]
SIMULATOR_CAPACITIES = (6, 12, 25, 51, 102, 204, 409, 819, 1638, 3276, 6553, 13107, 26214, 52428)
LIBCACHESIM_NAMES = {
    "lru": "LRU", "fifo": "FIFO", "lfu": "LFU", "sieve": "Sieve", "clock": "Clock", "s3fifo": "S3FIFO", "arc": "ARC",
    "two_queues": "TwoQ", "slru": "SLRU", "lirs": "LIRS", "gdsf": "GDSF", "lhd": "LHD", "hyperbolic": "Hyperbolic",
    "tinylfu": "WTinyLFU", "belady": "Belady",
}  # fmt: skip


def _kvcache_simulator() -> Rows:
    """Every budget that fills before the second half: 14 of the conversation trace, 13 of the synthetic one."""
    _need("kvcache_sim", "kvcache-simulator")
    from kvcache_sim.plan import build_execution_plan
    from kvcache_sim.policies import simulate_policy
    from kvcache_sim.trace import parse_trace_file

    rows: Rows = []
    for name in KVCACHE_SIMULATOR:
        trace, path = load_trace(name), find_trace(name)[0]
        plan = build_execution_plan(parse_trace_file(str(path), block_size=512))
        for policy in ("fifo", "lru", "optimal"):
            for capacity in SIMULATOR_CAPACITIES:
                theirs = simulate_policy(plan, policy, capacity)
                if theirs.measurementMode == "underfilled_at_window":
                    continue
                ours = replay(
                    trace, policy, capacity_chunks=capacity, semantics="object" if policy == "fifo" else "prefix"
                )
                rows.append((name, policy, f"{capacity} blocks", f"{theirs.hitRate:.6f}", ours.second_half()))
    return rows


def _libcachesim() -> Rows:
    """Miss ratio of every policy that both have, at the capacities of the reference table."""
    _need("libcachesim", "libcachesim")
    import libcachesim

    rows: Rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (capacities, table) in LIBCACHESIM.items():
            trace = load_trace(name)
            records = str(to_oracle_general(trace, Path(folder) / f"{name}.oracleGeneral.bin"))
            for policy in table:
                for capacity in capacities:
                    reader = libcachesim.TraceReader(records, libcachesim.TraceType.ORACLE_GENERAL_TRACE)
                    theirs, _ = getattr(libcachesim, LIBCACHESIM_NAMES[policy])(capacity).process_trace(reader)
                    ours = replay(trace, policy, capacity_chunks=capacity, semantics="object")
                    rows.append((name, policy, f"{capacity} blocks", f"{theirs:.6f}", 1 - ours.hit_rate_by_chunks))
    return rows


def _need(module: str, package: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise InvalidInputError(f"{package} is not installed; `pip install {package}` to run it beside ours")


LIVE_TABLES: dict[str, Callable[[], Rows]] = {"kvcache_simulator": _kvcache_simulator, "libcachesim": _libcachesim}

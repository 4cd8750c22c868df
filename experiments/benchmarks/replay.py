"""Replay speed: our compiled policies beside libCacheSim's C core, its Python plugin, and the same algorithms in C.

    python -m experiments.benchmarks.replay --out replay.json [--short]

Everything runs in one process on one thread, interleaved round by round, and is timed as CPU time; best and median of
the rounds are kept. libcachesim and gcc are used where they are installed and left out, by name, where not.
"""

import argparse
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.benchmarks import row
from experiments.replay import ready, replay
from experiments.traces import Trace, load_trace, to_oracle_general, zipf
from workbench.errors import InvalidInputError
from workbench.policies import resolve_policy

__all__ = ["run"]

PEERS = {"lru": "LRU", "sieve": "Sieve", "s3fifo": "S3FIFO", "arc": "ARC", "fifo": "FIFO"}
WEKA_ACCESSES = 10_000_000

CELL = '''
from workbench.policies import policy

@policy
class CellSieve:
    """SIEVE as one would write it in a notebook cell."""
    fields = dict(visited="u1", newer="i4", older="i4")
    scalars = dict(head=-1, tail=-1, hand=-1)

    def on_hit(self, c):
        self.visited[c] = 1

    def on_insert(self, c):
        self.visited[c] = 0
        self.newer[c] = -1
        head = self.head
        self.older[c] = head
        if head >= 0:
            self.newer[head] = c
        else:
            self.tail = c
        self.head = c

    def evict(self):
        c = self.hand if self.hand >= 0 else self.tail
        while self.visited[c]:
            self.visited[c] = 0
            newer = self.newer[c]
            c = newer if newer >= 0 else self.tail
        newer = self.newer[c]
        older = self.older[c]
        self.hand = newer
        if newer >= 0:
            self.older[newer] = older
        else:
            self.head = older
        if older >= 0:
            self.newer[older] = newer
        else:
            self.tail = newer
        return c
'''

C_SOURCE = r"""
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
int64_t lru(const int32_t *ids, int64_t n, int64_t capacity, int64_t distinct) {
    int32_t *next = malloc(4 * (distinct + 1)), *prev = malloc(4 * (distinct + 1));
    uint8_t *in = calloc(distinct, 1);
    int32_t end = distinct; int64_t size = 0, misses = 0;
    next[end] = prev[end] = end;
    for (int64_t i = 0; i < n; i++) {
        int32_t b = ids[i];
        if (in[b]) { int32_t p = prev[b], q = next[b]; next[p] = q; prev[q] = p; }
        else {
            misses++;
            if (size == capacity) { int32_t v = next[end], q = next[v]; next[end] = q; prev[q] = end; in[v] = 0; }
            else size++;
            in[b] = 1;
        }
        int32_t last = prev[end];
        next[last] = b; prev[b] = last; next[b] = end; prev[end] = b;
    }
    free(next); free(prev); free(in);
    return misses;
}
int64_t sieve(const int32_t *ids, int64_t n, int64_t capacity, int64_t distinct) {
    int32_t *newer = malloc(4 * distinct), *older = malloc(4 * distinct);
    uint8_t *in = calloc(distinct, 1), *visited = calloc(distinct, 1);
    int32_t head = -1, tail = -1, hand = -1; int64_t size = 0, misses = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t b = ids[i];
        if (in[b]) { visited[b] = 1; continue; }
        misses++;
        if (size == capacity) {
            int32_t v = hand >= 0 ? hand : tail;
            while (visited[v]) { visited[v] = 0; v = newer[v] >= 0 ? newer[v] : tail; }
            int32_t up = newer[v], down = older[v];
            hand = up;
            if (up >= 0) older[up] = down; else head = down;
            if (down >= 0) newer[down] = up; else tail = up;
            in[v] = 0;
        } else size++;
        in[b] = 1; visited[b] = 0; newer[b] = -1; older[b] = head;
        if (head >= 0) newer[head] = b; else tail = b;
        head = b;
    }
    free(newer); free(older); free(in); free(visited);
    return misses;
}
"""

Runner = Callable[[], tuple[float, float]]  # -> (CPU seconds, miss ratio)


def run(*, short: bool = False, rounds: int = 5) -> dict[str, Any]:
    """Run the benchmark.

    Args:
        short: A tenth of the accesses, one capacity, no WEKA trace.
        rounds: How often each contestant runs.

    Returns:
        machine; results, one for each trace, capacity and contestant; ratios of best times; rows of the table of all
        benchmarks, the worst ratio for each goal; and what was left out.
    """
    left_out: list[str] = []
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        c_core = _compiled_c(Path(folder), left_out)
        for trace, capacities in _traces(short, left_out):
            records = to_oracle_general(trace, Path(folder) / f"{trace.name}.oracleGeneral.bin")
            for capacity in capacities:
                contestants = _contestants(trace, capacity, records, c_core, left_out)
                rows += _interleaved(trace, capacity, contestants, rounds)
    ratios = _ratios(rows)
    return {
        "machine": _machine(),
        "results": rows,
        "ratios": ratios,
        "rows": _goals(ratios),
        "left_out": sorted(set(left_out)),
    }


def _traces(short: bool, left_out: list[str]) -> list[tuple[Trace, tuple[int, ...]]]:
    if short:
        return [(zipf(objects=100_000, accesses=1_000_000), (10_000,))]
    traces: list[tuple[Trace, tuple[int, ...]]] = [(zipf(), (1_000, 10_000, 100_000))]
    try:
        traces.append((load_trace("weka_claude_code").head(accesses=WEKA_ACCESSES), (20_000, 200_000)))
    except InvalidInputError as error:
        left_out.append(f"weka_claude_code: {error}")
    return traces


def _contestants(
    trace: Trace, capacity: int, records: Path, c_core: ctypes.CDLL | None, left_out: list[str]
) -> dict[str, Runner]:
    runners: dict[str, Runner] = {}
    for name in PEERS:
        runners[f"ours {name}"] = _ours(trace, name, capacity)
    runners["ours sieve from a cell"] = _ours(trace, _cell_policy(), capacity)
    if c_core is not None:
        for name in ("lru", "sieve"):
            runners[f"gcc -O3 {name}"] = _c(trace, getattr(c_core, name), capacity)
    if importlib.util.find_spec("libcachesim") is None:
        left_out.append("libcachesim is not installed")
        return runners
    for name, theirs in PEERS.items():
        runners[f"libcachesim {name}"] = _libcachesim(records, theirs, capacity)
    runners["libcachesim python plugin lru"] = _plugin(records, capacity)
    return runners


def _ours(trace: Trace, policy: Any, capacity: int) -> Runner:
    ready(policy, semantics="object")

    def once() -> tuple[float, float]:
        result = replay(trace, policy, capacity_chunks=capacity, semantics="object")
        return result.seconds, 1 - result.hit_rate_by_chunks

    return once


def _cell_policy() -> Any:
    """The class as IPython makes it from a cell; from a file where IPython is not installed."""
    if importlib.util.find_spec("IPython") is not None:
        from IPython.core.interactiveshell import InteractiveShell

        shell = InteractiveShell.instance()
        if "CellSieve" not in shell.user_ns:
            shell.run_cell(CELL, store_history=True)
        return shell.user_ns["CellSieve"]
    path = Path(tempfile.mkdtemp()) / "cell.py"
    path.write_text(CELL)
    return resolve_policy(f"{path}:CellSieve")


def _c(trace: Trace, function: Any, capacity: int) -> Runner:
    ids = np.ascontiguousarray(trace.ids, np.int32)
    function.restype = ctypes.c_int64
    arguments = (
        ids.ctypes.data_as(ctypes.c_void_p),
        *(ctypes.c_int64(x) for x in (len(ids), capacity, trace.distinct)),
    )

    def once() -> tuple[float, float]:
        started = time.thread_time()
        misses = function(*arguments)
        return time.thread_time() - started, misses / len(ids)

    return once


def _libcachesim(records: Path, name: str, capacity: int) -> Runner:
    import libcachesim

    def once() -> tuple[float, float]:
        reader = libcachesim.TraceReader(str(records), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
        cache = getattr(libcachesim, name)(capacity)
        started = time.thread_time()
        misses, _ = cache.process_trace(reader)
        return time.thread_time() - started, float(misses)

    return once


def _plugin(records: Path, capacity: int, most: int = 300_000) -> Runner:
    """LRU through libCacheSim's Python hooks, on the first accesses; its miss ratio is of those alone."""
    import libcachesim

    def miss(order: OrderedDict, request: Any) -> None:
        order[request.obj_id] = None

    def evict(order: OrderedDict, request: Any) -> int:
        return order.popitem(last=False)[0]

    def once() -> tuple[float, float]:
        reader = libcachesim.TraceReader(str(records), libcachesim.TraceType.ORACLE_GENERAL_TRACE)
        cache = libcachesim.PluginCache(
            cache_size=capacity,
            cache_init_hook=lambda _: OrderedDict(),
            cache_hit_hook=lambda order, request: order.move_to_end(request.obj_id),
            cache_miss_hook=miss,
            cache_eviction_hook=evict,
            cache_remove_hook=lambda order, obj_id: order.pop(obj_id, None),
            cache_free_hook=lambda order: order.clear(),
        )
        started = time.thread_time()
        misses, _ = cache.process_trace(reader, max_req=most)
        return time.thread_time() - started, float(misses)

    once.accesses = most  # type: ignore[attr-defined]
    return once


def _compiled_c(folder: Path, left_out: list[str]) -> ctypes.CDLL | None:
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        left_out.append("no C compiler")
        return None
    source, library = folder / "policies.c", folder / "policies.so"
    source.write_text(C_SOURCE)
    subprocess.run([compiler, "-O3", "-march=native", "-shared", "-fPIC", source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def _interleaved(trace: Trace, capacity: int, contestants: dict[str, Runner], rounds: int) -> list[dict[str, Any]]:
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    misses: dict[str, float] = {}
    for once in contestants.values():
        once()  # warm: files in the page cache, code loaded
    for _ in range(rounds):
        for name, once in contestants.items():
            spent, misses[name] = once()
            seconds[name].append(spent)
    rows = []
    for name, once in contestants.items():
        accesses = min(trace.accesses, getattr(once, "accesses", trace.accesses))
        rows.append(
            {
                "trace": trace.name,
                "capacity": capacity,
                "contestant": name,
                "miss_ratio": round(misses[name], 6),
                "best_million_per_second": round(accesses / min(seconds[name]) / 1e6, 3),
                "median_million_per_second": round(accesses / statistics.median(seconds[name]) / 1e6, 3),
            }
        )
    return rows


def _ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Our best speed over each peer's, for the same policy, trace and capacity."""
    speed = {(r["trace"], r["capacity"], r["contestant"]): r["best_million_per_second"] for r in rows}
    found = []
    for (trace, capacity, name), value in speed.items():
        if not name.startswith("ours "):
            continue
        policy = name.split()[1]
        for peer in (f"libcachesim {policy}", f"gcc -O3 {policy}", "libcachesim python plugin lru"):
            if (trace, capacity, peer) in speed:
                ratio = round(value / speed[trace, capacity, peer], 2)
                found.append({"trace": trace, "capacity": capacity, "ours": name, "peer": peer, "ratio": ratio})
    return found


GOALS = (  # trace, our contestants, the peer's name begins with, least ratio
    ("zipf", ("ours lru", "ours sieve", "ours sieve from a cell"), "libcachesim lru,libcachesim sieve", 5.0),
    ("zipf", ("ours lru", "ours sieve", "ours sieve from a cell"), "libcachesim python", 60.0),
    ("zipf", ("ours lru", "ours sieve", "ours sieve from a cell"), "gcc", 0.7),
    ("zipf", ("ours s3fifo", "ours arc"), "libcachesim s3fifo,libcachesim arc", 4.0),
    ("weka_claude_code", ("ours lru", "ours sieve"), "libcachesim lru,libcachesim sieve", 10.0),
)


def _goals(ratios: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The worst ratio over policies and capacities, for each goal that was measured."""
    rows = []
    for trace, ours, peers, least in GOALS:
        begins = tuple(peers.split(","))
        found = [r for r in ratios if r["trace"] == trace and r["ours"] in ours and r["peer"].startswith(begins)]
        if found:
            worst = min(found, key=lambda r: r["ratio"])
            work = f"replay {trace}: {worst['ours'].removeprefix('ours ')} at {worst['capacity']} (worst)"
            ratio = worst["ratio"]
            rows.append(
                row(work, ours="this", peer=worst["peer"], ratio=ratio, goal=f">= {least:g}x", met=ratio >= least)
            )
    return rows


def _machine() -> dict[str, Any]:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    versions = {}
    for package in ("numba", "numpy", "libcachesim"):
        if importlib.util.find_spec(package) is not None:
            versions[package] = importlib.metadata.version(package)
    return {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "load": load, **versions}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the JSON here; printed in any case")
    parser.add_argument("--short", action="store_true", help="a small Zipf trace only")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    report = json.dumps(run(short=options.short, rounds=options.rounds), indent=1)
    if options.out:
        options.out.write_text(report)
    print(report)


if __name__ == "__main__":
    sys.exit(main())

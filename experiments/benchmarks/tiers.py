"""Speed of the slower tiers against the plain use of the same medium, in one interleaved run.

    python -m experiments.benchmarks.tiers [--repeats 7] [--chunks 4] [--directory /path/on/the/disk] [> tiers.json]

Each tier moves the same bytes as its plain counterpart, in turns, so that a busy machine slows both:

    redis  a redis-py pipeline of SET and of GET of the same values, with its own parser
    disk   write of a new file (with fsync where the tier is durable), read into a buffer; the page cache is warm

A ratio over 1 means that the tier is the faster one, although it also makes and checks records.
"""

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from experiments.benchmarks import row
from experiments.environment import describe_environment
from workbench.chunks import Chunk, ChunkChain
from workbench.tiers.base import Tier
from workbench.tiers.disk import DiskTier
from workbench.tiers.redis import RedisTier

__all__ = ["main", "measure", "measure_disk", "measure_lookup", "measure_redis", "redis_server", "run"]

CHUNK_TOKENS, TOKEN_NBYTES = 256, 128 << 10  # 32 layers x 8 KV heads x 128, 16 bit
LOOKUP_CHUNKS = 40


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description="Speed of the slower tiers against the plain use of the same medium.")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--chunk-tokens", type=int, default=CHUNK_TOKENS)
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure; a temporary one without")
    options = parser.parse_args(arguments)
    print(json.dumps(measure(options.chunks, options.repeats, options.chunk_tokens, options.directory), indent=2))


def measure(chunks: int, repeats: int, chunk_tokens: int = CHUNK_TOKENS, directory: Path | None = None) -> dict:
    """Disk, durable and not, and Redis where a server is installed."""
    nbytes = chunk_tokens * TOKEN_NBYTES
    payloads = [np.random.default_rng(i).integers(0, 256, nbytes, dtype=np.uint8) for i in range(chunks)]
    result = {
        "environment": describe_environment(),
        "chunk_nbytes": nbytes,
        "chunks": chunks,
        "repeats": repeats,
        "disk": measure_disk(payloads, repeats, directory=directory),
        "disk_durable": measure_disk(payloads, repeats, directory=directory, durable=True),
    }
    if shutil.which("redis-server"):
        with redis_server() as port:
            result["redis"] = measure_redis(payloads, repeats, port=port)
            result["redis_lookup"] = measure_lookup(repeats, port=port)
    return result


def run(short: bool = False) -> dict:
    """Rows for the table of all benchmarks."""
    result = measure(2 if short else 4, 5 if short else 9)
    rows = [
        row(f"tier {name}, {what}", ours="", limit="plain use of the same medium", ratio=result[name][f"{what}_ratio"],
            goal=">= 0.9", met=result[name][f"{what}_ratio"] >= 0.9)
        for name in ("disk", "disk_durable", "redis")
        if name in result
        for what in ("write", "read")
    ]  # fmt: skip
    return {"name": "tiers", **result, "rows": rows}


def measure_disk(payloads: list[np.ndarray], repeats: int, *, directory: Path | None = None,
                 durable: bool = False) -> dict:  # fmt: skip
    """Disk tier against plain files: bytes per second and ratios."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        tier = DiskTier(Path(folder) / "tier", durable=durable)
        plain = Path(folder) / "plain"
        outs = [np.empty_like(payload) for payload in payloads]

        def write_plain() -> None:
            plain.mkdir()
            for i, payload in enumerate(payloads):
                with open(plain / str(i), "wb", buffering=0) as file:
                    _write_all(file, payload)
                    if durable:
                        os.fsync(file.fileno())

        def read_plain() -> None:
            for i, out in enumerate(outs):
                with open(plain / str(i), "rb", buffering=0) as file:
                    _read_all(file, out)

        return _compare(tier, payloads, outs, repeats, write_plain=write_plain, read_plain=read_plain,
                        forget_plain=lambda: shutil.rmtree(plain))  # fmt: skip


def measure_redis(payloads: list[np.ndarray], repeats: int, *, port: int) -> dict:
    """Redis tier against a pipeline of redis-py: bytes per second and ratios."""
    import redis
    from redis.utils import HIREDIS_AVAILABLE

    tier, client = RedisTier(f"redis://127.0.0.1:{port}", timeout_seconds=10.0), redis.Redis(port=port)
    outs = [np.empty_like(payload) for payload in payloads]

    def write_plain() -> None:
        pipeline = client.pipeline(transaction=False)
        for i, payload in enumerate(payloads):
            pipeline.set(f"plain{i}", payload.data)
        pipeline.execute()

    def read_plain() -> None:
        pipeline = client.pipeline(transaction=False)
        for i in range(len(payloads)):
            pipeline.get(f"plain{i}")
        pipeline.execute()

    found = _compare(tier, payloads, outs, repeats, write_plain=write_plain, read_plain=read_plain,
                     forget_plain=lambda: client.delete(*(f"plain{i}" for i in range(len(payloads)))))  # fmt: skip
    return {**found, "plain_parser": "hiredis" if HIREDIS_AVAILABLE else "python"}


def measure_lookup(repeats: int, *, port: int) -> dict:
    """`contains` for 40 chunks against one redis-py pipeline and against 40 single questions, in microseconds."""
    import redis

    tier, client = RedisTier(f"redis://127.0.0.1:{port}"), redis.Redis(port=port)
    chunks = _chunks(LOOKUP_CHUNKS)
    for chunk in chunks:
        tier.write(chunk, np.zeros(1000, np.uint8))
    names = [f"kvworkbench:{chunk.key.hex()}" for chunk in chunks]
    keys = [chunk.key for chunk in chunks]

    def pipeline() -> list:
        questions = client.pipeline(transaction=False)
        for name in names:
            questions.exists(name)
        return questions.execute()

    calls = {"tier": lambda: tier.contains(keys), "plain_pipeline": pipeline,
             "one_by_one": lambda: [client.exists(name) for name in names]}  # fmt: skip
    assert all(all(call()) for call in calls.values())
    seconds = _interleaved(calls, 20 * repeats)
    tier.close()
    return {f"{name}_microseconds": 1e6 * statistics.median(s) for name, s in seconds.items()}


def _compare(tier: Tier, payloads: list[np.ndarray], outs: list[np.ndarray], repeats: int, *,
             write_plain: Callable[[], None], read_plain: Callable[[], None],
             forget_plain: Callable[[], object]) -> dict:  # fmt: skip
    """Write, read and forget with the tier and plainly, in turns."""
    chunks = _chunks(len(payloads))

    def write_tier() -> None:
        for chunk, payload in zip(chunks, payloads, strict=True):
            reason, _ = tier.write(chunk, payload)
            assert reason == "", reason

    def read_tier() -> None:
        for chunk, out in zip(chunks, outs, strict=True):
            reason = tier.read(chunk, out)
            assert reason == "", reason

    calls = {"write": write_tier, "plain_write": write_plain, "read": read_tier, "plain_read": read_plain}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        order = ("", "plain_") if repeat % 2 else ("plain_", "")
        for verb in ("write", "read"):
            for kind in order:
                _add_seconds(seconds, f"{kind}{verb}", calls[f"{kind}{verb}"])
        assert all(np.array_equal(out, payload) for out, payload in zip(outs, payloads, strict=True))
        for chunk in chunks:
            tier.erase(chunk.key)
        forget_plain()
    tier.close()
    total = sum(payload.nbytes for payload in payloads)
    median = {name: statistics.median(s[1:]) for name, s in seconds.items()}  # the first round warms up
    return {
        **{f"{name}_bytes_per_second": total / s for name, s in median.items()},
        "write_ratio": _paired_ratio(seconds["plain_write"], seconds["write"]),
        "read_ratio": _paired_ratio(seconds["plain_read"], seconds["read"]),
    }


def _interleaved(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            _add_seconds(seconds, name, call)
    return seconds


def _add_seconds(seconds: dict[str, list[float]], name: str, call: Callable[[], object]) -> None:
    start = time.perf_counter()
    call()
    seconds[name].append(time.perf_counter() - start)


def _paired_ratio(plain: list[float], tier: list[float]) -> float:
    """Median over the rounds of plain seconds / tier seconds: neighbours in time are compared."""
    return statistics.median(p / t for p, t in zip(plain[1:], tier[1:], strict=True))


def _chunks(count: int) -> list[Chunk]:
    return list(ChunkChain(bytes(32), CHUNK_TOKENS).extend(np.arange(count * CHUNK_TOKENS)))


def _write_all(file, payload: np.ndarray) -> None:
    left = payload.data
    while left:
        left = left[file.write(left) :]


def _read_all(file, out: np.ndarray) -> None:
    left = out.data
    while left:
        left = left[file.readinto(left) :]


@contextlib.contextmanager
def redis_server() -> Iterator[int]:
    """A `redis-server` of its own on a free port of this machine, without persistence; yields the port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
        process = subprocess.Popen([*command, "--dir", folder], stdout=subprocess.DEVNULL)
        try:
            _wait_for(port)
            yield port
        finally:
            process.terminate()
            process.wait()


def _wait_for(port: int, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2):
            return
        time.sleep(0.02)
    raise TimeoutError(f"redis-server does not listen on port {port} after {seconds} s")


if __name__ == "__main__":
    main()

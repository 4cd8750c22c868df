"""Speed of the slower tiers against the plain use of the same medium, in one interleaved run.

    python -m experiments.benchmarks.tiers [--repeats 7] [--chunks 4] [--directory /path/on/the/disk] [> tiers.json]

Each tier moves the same bytes as its plain counterpart, in turns, so that a busy machine slows both:

    redis  a redis-py pipeline of SET and of GET of the same values, with its own parser
    disk   write of a new file (with fsync where the tier is durable), read into a buffer; the page cache is warm

A ratio over 1 means that the tier is the faster one, although it also makes and checks records. Beside these stand the
same moves through the whole engine, from KV pages to the medium and back with the data plane's two readers, and, where
KVWORKBENCH_LMCACHE_PYTHON names an interpreter that has it, LMCache 0.5.6 doing the same in the same rounds.
"""

import argparse
import contextlib
import itertools
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
from typing import NamedTuple

import numpy as np

from experiments.benchmarks import row
from experiments.benchmarks._peer import Peer, lmcache_peer
from experiments.environment import describe_environment
from kernels.pages import PageTable
from workbench.chunks import Chunk, ChunkChain
from workbench.engine import CacheEngine
from workbench.layout import Identity, KVLayout
from workbench.tiers.base import Tier
from workbench.tiers.disk import DiskTier
from workbench.tiers.redis import RedisTier

__all__ = ["Moves", "main", "measure", "measure_disk", "measure_lookup", "measure_redis", "redis_server", "run"]

CHUNK_TOKENS, TOKEN_NBYTES = 256, 128 << 10  # 32 layers x 8 KV heads x 128, 16 bit
LOOKUP_CHUNKS = 40


class Moves(NamedTuple):
    """One way to write some bytes, to read them back and to forget them."""

    write: Callable[[], object]
    read: Callable[[], object]
    forget: Callable[[], object]


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
    result = {"environment": describe_environment(), "chunk_nbytes": nbytes, "chunks": chunks, "repeats": repeats}
    with lmcache_peer() as peer:
        result["disk"] = measure_disk(payloads, repeats, directory=directory, peer=peer)
        result["disk_durable"] = measure_disk(payloads, repeats, directory=directory, durable=True)
        if shutil.which("redis-server"):
            with redis_server() as port:
                result["redis"] = measure_redis(payloads, repeats, port=port, peer=peer)
                result["redis_lookup"] = measure_lookup(repeats, port=port)
    return result


def run(short: bool = False) -> dict:
    """Rows for the table of all benchmarks."""
    result = measure(2 if short else 4, 5 if short else 9)
    rows = []
    for name, verb in itertools.product(("disk", "disk_durable", "redis"), ("write", "read")):
        if found := result.get(name):
            plain = _speed(found, f"plain_{verb}")
            ratio = found[f"tier_{verb}_ratio"]
            rows.append(row(f"tier {name}, {verb}", ours=_speed(found, f"tier_{verb}"), limit=plain, ratio=ratio,
                            goal=">= 0.9", met=ratio >= 0.9))  # fmt: skip
            rows.append(row(f"whole engine over {name}, {verb}", ours=_speed(found, f"engine_{verb}"),
                            peer=_speed(found, f"peer_{verb}"), limit=plain,
                            ratio=found[f"engine_{verb}_ratio"]))  # fmt: skip
    return {"name": "tiers", **result, "rows": rows}


def _speed(found: dict, name: str) -> str | None:
    speed = found.get(f"{name}_bytes_per_second")
    return None if speed is None else f"{speed / 1e9:.2f} GB/s"


def measure_disk(payloads: list[np.ndarray], repeats: int, *, directory: Path | None = None, durable: bool = False,
                 peer: Peer | None = None) -> dict:  # fmt: skip
    """Disk tier, and the engine over it, against plain files: bytes per second and ratios."""
    outs = [np.empty_like(payload) for payload in payloads]
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        if peer:
            peer.open("dense", len(payloads), disk=f"{folder}/peer")
        settings = {"disk_path": Path(folder) / "engine", "disk_durable": durable}
        own = DiskTier(Path(folder) / "tier", durable=durable)
        with contextlib.closing(own) as tier, _engine(payloads, settings) as through_engine:
            ways = {"tier": _tier_moves(tier, payloads, outs), "engine": through_engine,
                    "plain": _file_moves(Path(folder) / "plain", payloads, outs, durable)}  # fmt: skip
            return _compare(ways, payloads, outs, repeats, peer=peer)


def measure_redis(payloads: list[np.ndarray], repeats: int, *, port: int, peer: Peer | None = None) -> dict:
    """Redis tier, and the engine over it, against a pipeline of redis-py: bytes per second and ratios."""
    from redis.utils import HIREDIS_AVAILABLE

    url, outs = f"redis://127.0.0.1:{port}", [np.empty_like(payload) for payload in payloads]
    if peer:
        peer.open("dense", len(payloads), redis=port)
    settings, own = {"redis_url": url, "redis_timeout_seconds": 10.0}, RedisTier(url, timeout_seconds=10.0)
    with contextlib.closing(own) as tier, _engine(payloads, settings) as through_engine:
        ways = {"tier": _tier_moves(tier, payloads, outs), "engine": through_engine,
                "plain": _pipeline_moves(port, payloads)}  # fmt: skip
        found = _compare(ways, payloads, outs, repeats, peer=peer)
    return {**found, "plain_parser": "hiredis" if HIREDIS_AVAILABLE else "python"}


def _tier_moves(tier: Tier, payloads: list[np.ndarray], outs: list[np.ndarray]) -> Moves:
    """The tier by itself: chunk after chunk, in one thread."""
    chunks = _chunks(len(payloads))

    def write() -> None:
        for chunk, payload in zip(chunks, payloads, strict=True):
            reason, _ = tier.write(chunk, payload)
            assert reason == "", reason

    def read() -> None:
        for chunk, out in zip(chunks, outs, strict=True):
            reason = tier.read(chunk, out)
            assert reason == "", reason

    def forget() -> None:
        for chunk in chunks:
            tier.erase(chunk.key)

    return Moves(write, read, forget)


@contextlib.contextmanager
def _engine(payloads: list[np.ndarray], settings: dict) -> Iterator[Moves]:
    """The engine without a memory tier: pages -> staging -> medium, and medium -> staging -> other pages."""
    count, tokens = len(payloads), payloads[0].nbytes // TOKEN_NBYTES
    layout = KVLayout(num_layers=32, num_kv_heads=8, head_size=128, block_size=tokens, chunk_tokens=tokens)
    layers = [np.zeros((2 * count, layout.page_nbytes), np.uint8) for _ in range(layout.num_layers)]
    for layer, pages in enumerate(layers):
        for number, payload in enumerate(payloads):
            pages[number] = payload.reshape(layout.num_layers, -1)[layer]
    table, prompt = PageTable(layers), np.arange(count * tokens)
    with CacheEngine(Identity(layout=layout, weights="bench"), memory_bytes=0,
                     staging_bytes=count * layout.chunk_nbytes, **settings) as engine:  # fmt: skip

        def write() -> None:
            assert engine.store(prompt, table, blocks=range(count)) == len(prompt) and engine.flush()

        def read() -> None:
            assert engine.retrieve(prompt, table, blocks=range(count, 2 * count)) == len(prompt)

        def forget() -> None:
            assert all(np.array_equal(pages[:count], pages[count:]) for pages in layers), "other bytes came back"
            engine.clear()
            engine.flush()
            for pages in layers:
                pages[count:] = 0

        yield Moves(write, read, forget)


def _file_moves(folder: Path, payloads: list[np.ndarray], outs: list[np.ndarray], durable: bool) -> Moves:
    """The same bytes in plain files."""

    def write() -> None:
        folder.mkdir()
        for i, payload in enumerate(payloads):
            with open(folder / str(i), "wb", buffering=0) as file:
                _write_all(file, payload)
                if durable:
                    os.fsync(file.fileno())

    def read() -> None:
        for i, out in enumerate(outs):
            with open(folder / str(i), "rb", buffering=0) as file:
                _read_all(file, out)

    return Moves(write, read, lambda: shutil.rmtree(folder))


def _pipeline_moves(port: int, payloads: list[np.ndarray]) -> Moves:
    """The same bytes through a pipeline of redis-py."""
    import redis

    client, names = redis.Redis(port=port), [f"plain{i}" for i in range(len(payloads))]

    def write() -> None:
        pipeline = client.pipeline(transaction=False)
        for name, payload in zip(names, payloads, strict=True):
            pipeline.set(name, payload.data)
        pipeline.execute()

    def read() -> None:
        pipeline = client.pipeline(transaction=False)
        for name in names:
            pipeline.get(name)
        pipeline.execute()

    return Moves(write, read, lambda: client.delete(*names))


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


def _compare(ways: dict[str, Moves], payloads: list[np.ndarray], outs: list[np.ndarray], repeats: int, *,
             peer: Peer | None) -> dict:  # fmt: skip
    """Write, read and forget in each way, in turns: bytes per second, and ratios to "plain", neighbours in time."""
    seconds: dict[str, list[float]] = {f"{way}_{verb}": [] for way in ways for verb in ("write", "read")}
    for repeat in range(repeats + 1):
        order = list(ways) if repeat % 2 else list(ways)[::-1]
        for verb in ("write", "read"):
            for way in order:
                _add_seconds(seconds, f"{way}_{verb}", getattr(ways[way], verb))
        assert all(np.array_equal(out, payload) for out, payload in zip(outs, payloads, strict=True))
        for moves in ways.values():
            moves.forget()
        if peer:
            peer.round()
    total = sum(payload.nbytes for payload in payloads)
    median = {name: statistics.median(s[1:]) for name, s in seconds.items()}  # the first round warms up
    if peer:
        theirs = peer.close()
        median |= {"peer_write": theirs["store_s"], "peer_read": theirs["retrieve_s"]}
    ratios = {
        f"{way}_{verb}_ratio": _paired_ratio(seconds[f"plain_{verb}"], seconds[f"{way}_{verb}"])
        for way in ways
        if way != "plain"
        for verb in ("write", "read")
    }
    return {**{f"{name}_bytes_per_second": total / s for name, s in median.items()}, **ratios}


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

"""How fast the kernels are, as a fraction of a plain copy of the same bytes in the same run.

    python -m experiments.benchmarks.kernels [--threads 1] [--block-size 16] [--vec] [--torch] [--out kernels.json]

One chunk of 256 tokens of a Llama 8B (32 layers, 8 KV heads of 128, bfloat16: 32 MiB), its blocks scattered at random
over a pool of four chunks. One thread is measured in CPU time, several on the wall clock. On a GPU: `--device cuda`,
and the fraction is of the device's own copy.
"""

import argparse
import json
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.benchmarks import row
from experiments.environment import describe_environment
from kernels.pages import PageTable, gather_pages, scatter_pages
from kernels.quantize import Scheme, allocate, dequantize, quantize
from kernels.rotate import random_signs, rotate, unrotate
from kernels.slots import gather_slots, scatter_slots
from kernels.threads import num_threads, thread_limit
from kernels.tiles import Tiles
from kernels.timing import Timing, time_against_copy

__all__ = ["GOALS", "KernelSpeed", "Pool", "measure_kernels", "run"]

LAYERS, HEADS, SIZE, CHUNK_TOKENS = 32, 8, 128, 256


@dataclass(frozen=True, slots=True)
class KernelSpeed:
    """Speed of one kernel.

    Attributes:
        copy_fraction: Speed over that of a plain copy; 1 is as fast as copying.
        torch_fraction: Speed over that of the torch expression for the same thing; None where not measured.
    """

    kernel: str
    gb_per_second: float
    copy_fraction: float
    torch_fraction: float | None
    threads: int


class Pool:
    """Pages of every layer, and the blocks of one chunk in them.

    Args:
        vec: Keys transposed inside a page, as vLLM's CPU backend has them; else tokens with K and V side by side.
    """

    def __init__(self, block_size: int = 16, *, vec: bool = False, layers: int = LAYERS):
        rng = np.random.default_rng(0)
        self.blocks_per_chunk = CHUNK_TOKENS // block_size
        blocks = 4 * self.blocks_per_chunk
        magnitude = rng.integers(0x3C00, 0x4040, (layers, blocks, HEADS, 2 * block_size * SIZE), np.uint16)
        self.bits = _aligned(magnitude.shape)
        np.bitwise_or(magnitude, rng.integers(0, 2, magnitude.shape, np.uint16) << 15, out=self.bits)
        if vec:
            halves = self.bits.reshape(layers, blocks, HEADS, 2, block_size * SIZE)
            keys = halves[:, :, :, 0].reshape(layers, blocks, HEADS, SIZE, block_size).swapaxes(-1, -2)
            values = halves[:, :, :, 1].reshape(layers, blocks, HEADS, block_size, SIZE)
        else:
            both = self.bits.reshape(layers, blocks, HEADS, block_size, 2 * SIZE)
            keys, values = both[..., :SIZE], both[..., SIZE:]
        self.tiles = (Tiles(keys), Tiles(values))
        self.both = None if vec else Tiles(both)
        self.blocks = rng.permutation(blocks)[: self.blocks_per_chunk].astype(np.int64)[None]
        self.block_size = block_size
        self.chunk_nbytes = self.bits.nbytes // 4

    def page_table(self) -> PageTable:
        return PageTable(list(self.bits.reshape(*self.bits.shape[:2], -1).view(np.uint8)))


def _aligned(shape: tuple[int, ...]) -> np.ndarray:
    """uint16 memory at a multiple of 64 bytes, where torch allocates a KV cache, and the engine its chunks."""
    raw = np.empty(2 * int(np.prod(shape)) + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + 2 * int(np.prod(shape))].view(np.uint16).reshape(shape)


def measure_kernels(
    pool: Pool, *, threads: int = 1, repeats: int = 9, torch: bool = False, names: Collection[str] = ()
) -> list[KernelSpeed]:
    """Measure the kernels of some names, or all, each in turn with a copy; `torch` adds the torch expressions."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    rows = []
    with thread_limit(threads):
        for name, work in _works(pool):
            if names and name not in names:
                continue
            timing = time_against_copy(work, pool.chunk_nbytes, repeats=repeats, clock=clock)
            beside = _TORCH.get(name) if torch and threads == 1 else None
            other = time_against_copy(beside(pool), pool.chunk_nbytes, repeats=3) if beside else None
            rows.append(_row(name, timing, other, threads))
    return rows


def _row(name: str, timing: Timing, other: Timing | None, threads: int) -> KernelSpeed:
    torch_fraction = timing.copy_fraction / other.copy_fraction if other else None
    return KernelSpeed(name, timing.bytes_per_second / 1e9, timing.copy_fraction, torch_fraction, threads)


def _works(pool: Pool) -> Iterator[tuple[str, Callable[[], object]]]:
    pages, slots = pool.page_table(), np.zeros(1, np.int64)
    arena = _aligned((1, len(pages.pages), pool.blocks_per_chunk, pages.page_nbytes // 2)).view(np.uint8)
    yield "gather pages", lambda: gather_pages(pages, pool.blocks, arena, slots)
    yield "scatter pages", lambda: scatter_pages(arena, slots, pages, pool.blocks)
    yield from _slot_works(pool)
    for name, keys, values in _schemes(pool):
        parts = [
            (tiles, scheme, allocate(tiles, scheme, 1, pool.blocks_per_chunk))
            for tiles, scheme in _passes(pool, keys, values)
        ]
        yield f"gather + {name}", lambda parts=parts: [quantize(t, pool.blocks, scheme=s, coded=c) for t, s, c in parts]
        yield (
            f"{name} + scatter",
            lambda parts=parts: [dequantize(t, pool.blocks, scheme=s, coded=c) for t, s, c in parts],
        )
    signs = random_signs(SIZE)
    turned = [
        np.zeros((1, t.num_layers, pool.blocks_per_chunk, HEADS, t.rows, t.columns), np.uint16) for t in pool.tiles
    ]
    pairs = list(zip(pool.tiles, turned, strict=True))
    yield "gather + rotate", lambda: [rotate(t, pool.blocks, signs=signs, turned=out) for t, out in pairs]
    yield "rotate + scatter", lambda: [unrotate(t, pool.blocks, signs=signs, turned=out) for t, out in pairs]


def _passes(pool: Pool, keys: Scheme, values: Scheme) -> list[tuple[Tiles, Scheme]]:
    """As the codecs do: keys and values at once where they lie side by side and are treated alike."""
    if pool.both is not None and keys == values:
        return [(pool.both, keys)]
    return list(zip(pool.tiles, (keys, values), strict=True))


def _slot_works(pool: Pool) -> Iterator[tuple[str, Callable[[], object]]]:
    offsets = np.arange(pool.block_size)
    slots = (pool.blocks[0][:, None] * pool.block_size + offsets).reshape(-1)
    plain = [np.zeros((t.num_layers, CHUNK_TOKENS, HEADS, SIZE), np.uint16) for t in pool.tiles]
    pairs = list(zip(pool.tiles, plain, strict=True))
    yield "gather slots", lambda: [gather_slots(t, slots, plain=p) for t, p in pairs]
    yield "scatter slots", lambda: [scatter_slots(t, slots, plain=p) for t, p in pairs]


def _schemes(pool: Pool) -> Iterator[tuple[str, Scheme, Scheme]]:
    """(name, scheme of the keys, scheme of the values)."""

    def channels(code: str, group: int) -> Scheme:
        return Scheme(code=code, along="channels", group=group)

    def tokens(code: str, group: int) -> Scheme:
        return Scheme(code=code, along="tokens", group=group)

    yield "int8 per token", channels("int8", SIZE), channels("int8", SIZE)
    yield "int8 keys per channel", tokens("uint8", CHUNK_TOKENS), channels("uint8", SIZE)  # the codec int8
    yield "fp8 e4m3", channels("e4m3", SIZE), channels("e4m3", SIZE)
    yield "fp8 e5m2", channels("e5m2", SIZE), channels("e5m2", SIZE)
    yield "int4 group 64", channels("uint4", 64), channels("uint4", 64)
    yield "int4 group 32", channels("uint4", 32), channels("uint4", 32)
    yield "KIVI 4 bit", tokens("uint4", 32), channels("uint4", 32)
    yield "KIVI 2 bit", tokens("uint2", 32), channels("uint2", 32)
    yield "int3 group 64", channels("uint3", 64), channels("uint3", 64)


def _torch_blocks(pool: Pool):
    """The chunk's blocks as a torch tensor of bfloat16, gathered by torch: (layers, blocks, ...)."""
    import torch

    torch.set_num_threads(1)
    pages = torch.from_numpy(pool.bits.view(np.int16)).view(torch.bfloat16)
    return pages, torch.from_numpy(pool.blocks[0])


def _torch_gather(pool: Pool) -> Callable[[], object]:
    pages, blocks = _torch_blocks(pool)
    return lambda: pages.index_select(1, blocks)


def _torch_int8(pool: Pool) -> Callable[[], object]:
    pages, blocks = _torch_blocks(pool)

    def work() -> list[Any]:
        out = []
        for layer in pages:
            x = layer.index_select(0, blocks).unflatten(-1, (-1, SIZE)).float()
            scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-10) / 127
            out.append(((x / scale).round().char(), scale))
        return out

    return work


def _torch_int4(pool: Pool) -> Callable[[], object]:
    pages, blocks = _torch_blocks(pool)

    def work() -> list[Any]:
        out = []
        for layer in pages:
            x = layer.index_select(0, blocks).unflatten(-1, (-1, 64)).float()
            low = x.amin(-1, keepdim=True)
            scale = (x.amax(-1, keepdim=True) - low).clamp_min(1e-10) / 15
            code = ((x - low) / scale).round().byte()
            out.append((code[..., :32] | code[..., 32:] << 4, scale, low))
        return out

    return work


def _torch_fp8(pool: Pool) -> Callable[[], object]:
    import torch

    pages, blocks = _torch_blocks(pool)

    def work() -> list[Any]:
        out = []
        for layer in pages:
            x = layer.index_select(0, blocks).unflatten(-1, (-1, SIZE)).float()
            scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-10) / 448
            out.append(((x / scale).to(torch.float8_e4m3fn), scale))
        return out

    return work


_TORCH = {
    "gather pages": _torch_gather,
    "gather + int8 per token": _torch_int8,
    "gather + fp8 e4m3": _torch_fp8,
    "gather + int4 group 64": _torch_int4,
}


def measure_on_gpu(block_size: int = 16, repeats: int = 20) -> list[KernelSpeed]:
    """The fused quantising gather and its inverse on a GPU, against the device's own copy of the same bytes."""
    import torch

    from kernels.quantize import Coded

    pool = Pool(block_size)
    pages = torch.from_numpy(pool.bits.view(np.int16)).cuda()
    both = pages.reshape(LAYERS, -1, HEADS, block_size, 2 * SIZE)
    source = torch.empty(pool.chunk_nbytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = _gpu_seconds(lambda: target.copy_(source), repeats)
    rows = []
    for name, keys, values in _schemes(pool):
        parts = []
        for tensor, scheme in ((both[..., :SIZE], keys), (both[..., SIZE:], values)):
            coded = allocate(pool.tiles[0], scheme, 1, pool.blocks_per_chunk)
            on_gpu = Coded(*(torch.from_numpy(a.view(np.int16) if a.itemsize == 2 else a).cuda() for a in coded))
            parts.append((Tiles(list(tensor)), scheme, on_gpu))
        for label, operation in ((f"gather + {name}", quantize), (f"{name} + scatter", dequantize)):
            seconds = _gpu_seconds(
                lambda op=operation, parts=parts: [op(t, pool.blocks, scheme=s, coded=c) for t, s, c in parts], repeats
            )
            rows.append(KernelSpeed(label, pool.chunk_nbytes / seconds / 1e9, copy / seconds, None, 0))
    return rows


def _gpu_seconds(work: Callable[[], object], repeats: int) -> float:
    """The best of several runs between two events of the device."""
    import torch

    best = float("inf")
    for run in range(repeats + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if run:
            best = min(best, start.elapsed_time(end) / 1e3)
    return best


# Least fraction of a copy on one thread, and on two where a goal is set; pages of 64 KiB.
GOALS = {
    ("gather pages", 1): 0.9,
    ("gather + int8 per token", 1): 0.9,
    ("gather + int8 per token", 2): 1.4,
    ("int8 per token + scatter", 1): 1.0,
    ("gather + int4 group 64", 1): 0.5,
    ("int4 group 64 + scatter", 1): 1.2,
    ("gather + fp8 e4m3", 1): 0.45,
    ("fp8 e4m3 + scatter", 1): 0.9,
}


def run(short: bool = False) -> dict[str, Any]:
    """Every kernel on one thread, some on two, as a fraction of a copy; rows for the table of all benchmarks."""
    repeats, pool = 3 if short else 9, Pool(16)
    speeds = measure_kernels(pool, threads=1, repeats=repeats)
    if num_threads() >= 2:
        on_two = [name for name, threads in GOALS if threads == 2]
        speeds += measure_kernels(pool, threads=2, repeats=repeats, names=on_two)
    rows = []
    for speed in speeds:
        goal = GOALS.get((speed.kernel, speed.threads))
        rows.append(
            row(
                f"kernel, {speed.threads} thread{'s' * (speed.threads > 1)}: {speed.kernel}",
                ours=f"{speed.gb_per_second:.1f} GB/s",
                limit="copy of the same bytes",
                ratio=speed.copy_fraction,
                goal="" if goal is None else f">= {goal}",
                met=None if goal is None else speed.copy_fraction >= goal,
            )
        )
    return {
        "name": "kernels",
        "environment": describe_environment(),
        "results": [asdict(s) for s in speeds],
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--vec", action="store_true", help="vLLM's CPU pages, keys transposed")
    parser.add_argument("--torch", action="store_true", help="beside torch's expressions for the same")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, help="where the rows go, as JSON")
    options = parser.parse_args()
    if options.device == "cuda":
        rows = measure_on_gpu(options.block_size)
    else:
        pool = Pool(options.block_size, vec=options.vec)
        rows = measure_kernels(pool, threads=options.threads, repeats=options.repeats, torch=options.torch)
    print(f"{'kernel':34s} GB/s   of a copy  of torch   ({options.threads} threads)")
    for speed in rows:
        beside = "" if speed.torch_fraction is None else f"{speed.torch_fraction:8.1f}"
        print(f"{speed.kernel:34s} {speed.gb_per_second:6.2f} {speed.copy_fraction:8.2f} {beside}")
    if options.out:
        options.out.write_text(json.dumps([asdict(speed) for speed in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()

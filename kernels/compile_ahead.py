"""Compile every Triton kernel for GPUs that are not there, and show what the compiler made of it.

    python -m kernels.compile_ahead [--arch 80 90 100] [--only quantize] [--json]

One row a kernel and architecture: registers, spilled bytes, shared memory, vector loads of all global loads, and the
instructions that would change bytes (fused multiply-add, approximate division). Shapes are those of a Llama 8B:
32 layers, 8 KV heads of 128, blocks of 16 tokens. Needs triton and its bundled ptxas, no driver and no GPU.
"""

import argparse
import contextlib
import io
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

os.environ["TRITON_ALWAYS_COMPILE"] = "1"  # a cached kernel would leave no log of ptxas

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import byteplanes_triton, pages_triton, quantize_triton, rotate_triton, slots_triton

__all__ = ["ARCHITECTURES", "Compiled", "Variant", "compile_variant", "variants"]

ARCHITECTURES = (80, 90, 100)


@dataclass(frozen=True, slots=True)
class Variant:
    """One kernel with the constants of one use; arguments that are not in `types` are constants."""

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the compiler made of a variant.

    Attributes:
        registers: Of a thread.
        spilled_bytes: Stored and loaded because registers ran out.
        shared_bytes: Of a program.
        vector_loads, loads: Global loads in the PTX, those of 64 bits and more a thread, and all.
        fused: Fused multiply-adds of floats.
        approximate: Approximate divisions.
    """

    name: str
    arch: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    vector_loads: int
    loads: int
    fused: int
    approximate: int


_PAGED = {"pointers": "*i64", "blocks": "*i64", "block_step": "i64", "head_step": "i64"}
_CODED = {**_PAGED, "row_step": "i64", "codes": "*u8", "scales": "*i16", "zeros": "*i16"}
_SHAPE = {"LAYERS": 32, "SPANS": 16, "SPAN": 1, "HEADS": 8, "ROWS": 16, "COLUMNS": 128, "ALIGNED": True}
_KINDS = {
    "int8": (0, 8),
    "uint8": (1, 8),
    "uint4": (1, 4),
    "uint3": (1, 3),
    "uint2": (1, 2),
    "e4m3": (2, 8),
    "e5m2": (3, 8),
}


def variants() -> Iterator[Variant]:
    """Every kernel in every use that changes its code."""
    for dtype in ("bfloat16", "float16"):
        for code, (kind, bits) in _KINDS.items():
            yield from _quantize_variants(code, dtype, {"KIND": kind, "BITS": bits, "FLOAT16": dtype == "float16"})
    types = {**_PAGED, "turned": "*i16", "before": "*fp32", "after": "*fp32", "token_step": "i64"}
    turn = {"channel_step": 1, "LAYERS": 32, "WIDTH": 16, "HEADS": 8, "TOKENS": 16, "CHANNELS": 128, "SIZE": 128}
    turn |= {"TOKEN_MAJOR": True, "FLOAT16": False, "ALIGNED": True, "AT_ONCE": 16}
    slot_types = {"pointers": "*i64", "slots": "*i64", "plain": "*i16", "block_step": "i64", "head_step": "i64"}
    slot = {"channel_step": 1, "HEADS": 8, "SIZE": 128, "PADDED": 128, "BLOCK_SIZE": 16, "ALIGNED": True, "AT_ONCE": 8}
    page_types = {"pointers": "*i64", "blocks": "*i64", "arena": "*i64", "slots": "*i64", "row_words": "i64"}
    page = {"WORDS": 8192, "STEP": 1024, "WIDTH": 16, "LAYERS": 32, "ALIGNED": True}
    for forward, gather in ((True, "gather"), (False, "scatter")):
        yield Variant(f"rotate/{gather}", rotate_triton.turn_tiles, types, turn | {"FORWARD": forward})
        yield Variant(
            f"slots/{gather}", slots_triton.copy_slots, {**slot_types, "token_step": "i64"}, slot | {"GATHER": forward}
        )
        yield Variant(f"pages/{gather}", pages_triton.copy_pages, page_types, page | {"GATHER": forward})
    planes = {"values": "*i16", "high": "*u8", "low": "*u8", "count": "i64"}
    yield Variant("byteplanes/split", byteplanes_triton.split_planes_kernel, planes, {"BLOCK": 2048})
    yield Variant("byteplanes/join", byteplanes_triton.join_planes_kernel, planes, {"BLOCK": 2048})


def _quantize_variants(code: str, dtype: str, constants: dict[str, Any]) -> Iterator[Variant]:
    constants = _SHAPE | constants
    along = constants | {"LENGTH": 128 if constants["BITS"] == 8 else 32, "AT_ONCE": 16}
    down = constants | {"LENGTH": 16, "AT_ONCE": 4}
    name = f"quantize/{code}/{dtype}"
    yield Variant(f"{name}/rows", quantize_triton.quantize_along_rows, _CODED, along)
    yield Variant(f"{name}/columns", quantize_triton.quantize_down_columns, _CODED, down)
    name = f"dequantize/{code}/{dtype}"
    yield Variant(f"{name}/rows", quantize_triton.dequantize_tiles, _CODED, along | {"ALONG_ROWS": True})
    yield Variant(
        f"{name}/columns", quantize_triton.dequantize_tiles, _CODED, down | {"ALONG_ROWS": False, "AT_ONCE": 16}
    )


def compile_variant(variant: Variant, arch: int) -> Compiled:
    """Compile to PTX and machine code; raises whatever Triton raises where the kernel does not compile."""
    names = variant.kernel.arg_names
    signature = {name: variant.types.get(name, "constexpr") for name in names}
    # What the launcher promises: pointers, steps and counts that are multiples of 16.
    hints = {(names.index(name),): [["tt.divisibility", 16]] for name in variant.types}
    source = ASTSource(fn=variant.kernel, signature=signature, constexprs=variant.constants, attrs=hints)
    log = io.StringIO()
    knobs.nvidia.dump_ptxas_log = True
    with contextlib.redirect_stdout(log):
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 4})
    ptx, text = compiled.asm["ptx"], log.getvalue()
    registers = re.search(r"Used (\d+) registers", text)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    assert registers and spills, f"ptxas left no log: {text!r}"
    return Compiled(
        name=variant.name,
        arch=arch,
        registers=int(registers[1]),
        spilled_bytes=int(spills[1]) + int(spills[2]),
        shared_bytes=compiled.metadata.shared,
        vector_loads=len(re.findall(r"ld\.global[.a-z0-9:]*v[248]", ptx)),
        loads=len(re.findall(r"ld\.global", ptx)),
        fused=len(re.findall(r"\bfma\.", ptx)),
        approximate=len(re.findall(r"div\.(?:full|approx)", ptx)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--arch", type=int, nargs="+", default=ARCHITECTURES)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chosen = [variant for variant in variants() if any(part in variant.name for part in options.only)]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        rows = [compile_variant(variant, arch) for variant in chosen for arch in options.arch]
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
        return
    print(f"{'kernel':42s} {'arch':6s} registers spilled shared vector/loads fused approximate")
    for row in rows:
        print(
            f"{row.name:42s} sm_{row.arch:<3d} {row.registers:9d} {row.spilled_bytes:7d} {row.shared_bytes:6d} "
            f"{row.vector_loads:6d}/{row.loads:<5d} {row.fused:5d} {row.approximate:11d}"
        )


if __name__ == "__main__":
    main()

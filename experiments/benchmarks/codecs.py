"""Size and speed of every codec and of the libraries beside them, as fractions of a plain copy in the same run.

    python -m experiments.benchmarks.codecs [--real] [--peers] [--out codecs.json]

One 256-token chunk, CPU time of one thread. The KV is made up (a mean and a loudness for each channel of the keys), of
32 layers, 8 heads of 128; with `--real` it is SmolLM2's on a page of Python's documentation. `--peers` adds lossless
libraries where they are installed: zstandard, lz4, blosc2, zipnn, openzl.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.benchmarks import row
from experiments.environment import describe_environment
from kernels.floats import encode16
from kernels.threads import thread_limit
from kernels.timing import time_against_copy
from workbench.codecs import codec_names, resolve_codec
from workbench.layout import KVLayout

__all__ = ["CodecSpeed", "made_up_chunk", "measure_codecs", "real_chunk"]

VARIANTS = ["int8(keys='token')", "int4(group=32)", "kivi(bits=2)", "rotated(bits=3)"]
VARIANTS += ["lossless(coder='rans')", "lossless(coder='zstd')"]


@dataclass(frozen=True, slots=True)
class CodecSpeed:
    """One codec on one chunk; GB are of bfloat16.

    Attributes:
        times: bfloat16 bytes over stored bytes.
        encode_fraction, decode_fraction: Speed over that of a plain copy.
        break_even_gbit: Link speed below which storing compressed loads faster than raw, on one core: Gbit/s.
    """

    codec: str
    times: float
    encode_gb_per_second: float
    decode_gb_per_second: float
    encode_fraction: float
    decode_fraction: float
    break_even_gbit: float


def made_up_chunk(page_format: str = "vllm-cpu-vec") -> tuple[np.ndarray, KVLayout]:
    layout = KVLayout(
        num_layers=32, num_kv_heads=8, head_size=128, block_size=128, chunk_tokens=256, page_format=page_format
    )
    chunk, rng = np.zeros(layout.chunk_shape, np.uint8), np.random.default_rng(0)
    keys, values = layout.keys_and_values(chunk)
    loud = np.exp(rng.standard_normal((1, 1, 8, 1, 128))).astype(np.float32)
    offset = rng.standard_normal(loud.shape).astype(np.float32)
    for layer in range(layout.num_layers):
        noise = rng.standard_normal((2, *keys.shape[1:]), np.float32)
        keys[layer] = encode16((noise[0] + offset[0]) * loud[0], "bfloat16")
        values[layer] = encode16(noise[1] * np.float32(0.3), "bfloat16")
    return chunk, layout


def real_chunk() -> tuple[np.ndarray, KVLayout]:
    """SmolLM2's KV of tokens 256 to 511 of a text, as vLLM's CPU backend would page it."""
    from experiments.quality import StudyModel, chunk_of_prefix, layout_of_prefix, sample_texts

    model = StudyModel("smollm2")
    text = next(iter(sample_texts().values()))
    prefix = model.prefix(model.tokenizer(text)["input_ids"][:512], 512)
    layout = layout_of_prefix(prefix)
    return chunk_of_prefix(prefix, layout, 256), layout


def measure_codecs(chunk: np.ndarray, layout: KVLayout, specs: list[str], repeats: int = 5) -> list[CodecSpeed]:
    """Encode and decode one chunk, each in turn with a copy of it."""
    rows = []
    with thread_limit(1):
        for spec in specs:
            codec, out = resolve_codec(spec), np.empty_like(chunk)
            data = codec.encode(chunk, layout)
            rows.append(
                _row(
                    repr(codec),
                    len(data),
                    chunk.nbytes,
                    lambda codec=codec: codec.encode(chunk, layout),
                    lambda codec=codec, data=data, out=out: codec.decode(data, layout, out),
                    repeats=repeats,
                )
            )
    return rows


def _row(
    name: str,
    stored: int,
    nbytes: int,
    encode: Callable[[], object],
    decode: Callable[[], object],
    *,
    repeats: int,
    clock: Callable[[], float] = time.thread_time,
) -> CodecSpeed:
    writing = time_against_copy(encode, nbytes, repeats=repeats, clock=clock)
    reading = time_against_copy(decode, nbytes, repeats=repeats, clock=clock)
    saved = max(nbytes - stored, 0)
    return CodecSpeed(
        codec=name,
        times=nbytes / stored,
        encode_gb_per_second=writing.bytes_per_second / 1e9,
        decode_gb_per_second=reading.bytes_per_second / 1e9,
        encode_fraction=writing.copy_fraction,
        decode_fraction=reading.copy_fraction,
        break_even_gbit=saved / reading.seconds * 8 / 1e9,
    )


def measure_peers(chunk: np.ndarray, repeats: int = 5) -> list[CodecSpeed]:
    """Lossless libraries on the same bytes; those that are not installed are left out."""
    rows = []
    for name, encode, decode in _peers(chunk):
        data = encode()
        back = np.frombuffer(decode(data), np.uint8)
        if not np.array_equal(back, chunk.reshape(-1)):
            raise RuntimeError(f"{name} gave other bytes back")
        # Process time: some of these have threads of their own even when asked for one.
        rows.append(
            _row(
                name,
                len(data),
                chunk.nbytes,
                encode,
                lambda decode=decode, data=data: decode(data),
                repeats=repeats,
                clock=time.process_time,
            )
        )
    return rows


def _peers(chunk: np.ndarray) -> Iterator[tuple[str, Callable[[], bytes], Callable[[bytes], bytes]]]:
    raw = chunk.reshape(-1).tobytes()
    makers = {
        "zstandard -1": _zstd,
        "lz4": _lz4,
        "blosc2 shuffle+zstd": _blosc2,
        "zipnn": _zipnn,
        "openzl bfloat16+huffman": _openzl,
    }
    for name, make in makers.items():
        try:
            compress, decompress = make()
        except ImportError:
            continue
        yield name, lambda compress=compress: compress(raw), decompress


def _zstd():
    import zstandard

    return zstandard.ZstdCompressor(level=1).compress, zstandard.ZstdDecompressor().decompress


def _lz4():
    import lz4.frame

    return lz4.frame.compress, lz4.frame.decompress


def _blosc2():
    import blosc2

    options = {"typesize": 2, "clevel": 1, "filter": blosc2.Filter.SHUFFLE, "codec": blosc2.Codec.ZSTD}
    blosc2.set_nthreads(1)
    return (lambda raw: blosc2.compress(raw, **options)), blosc2.decompress


def _zipnn():
    import zipnn

    coder = zipnn.ZipNN(bytearray_dtype="bfloat16", input_format="byte", threads=1)
    return (lambda raw: bytes(coder.compress(bytearray(raw)))), (lambda data: bytes(coder.decompress(data)))


def _openzl():
    import openzl.ext as zl

    compressor = zl.Compressor()
    graph = zl.nodes.BFloat16Deconstruct()(compressor, sign_frac=zl.graphs.Store(), exponent=zl.graphs.Huffman())
    compressor.set_parameter(zl.CParam.FormatVersion, zl.MAX_FORMAT_VERSION)
    compressor.select_starting_graph(graph)

    def compress(raw: bytes) -> bytes:
        context = zl.CCtx()
        context.ref_compressor(compressor)
        return context.compress([zl.Input(zl.Type.Numeric, np.frombuffer(raw, np.uint16))])

    return compress, lambda data: zl.DCtx().decompress(data)[0].content.as_nparray()


def run(short: bool = False) -> dict[str, Any]:
    """Every codec on made-up KV; rows for the table of all benchmarks."""
    chunk, layout = made_up_chunk()
    speeds = measure_codecs(chunk, layout, [*codec_names(), *VARIANTS], 2 if short else 5)
    rows = [
        row(
            f"codec {speed.codec}: {speed.times:.2f} times smaller",
            ours=f"{speed.encode_gb_per_second:.2f} / {speed.decode_gb_per_second:.2f} GB/s encode / decode",
            limit="decode over a copy",
            ratio=speed.decode_fraction,
        )
        for speed in speeds
    ]
    return {
        "name": "codecs",
        "environment": describe_environment(),
        "results": [asdict(s) for s in speeds],
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--codecs", nargs="+", default=[*codec_names(), *VARIANTS])
    parser.add_argument("--real", action="store_true", help="SmolLM2's KV instead of made-up numbers")
    parser.add_argument("--peers", action="store_true", help="lossless libraries beside ours")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="where the rows go, as JSON")
    options = parser.parse_args()
    chunk, layout = real_chunk() if options.real else made_up_chunk()
    rows = measure_codecs(chunk, layout, options.codecs, options.repeats)
    if options.peers:
        rows += measure_peers(chunk, options.repeats)
    print(f"{'codec':28s} times  encode GB/s (of a copy)  decode GB/s (of a copy)  pays below, Gbit/s a core")
    for speed in rows:
        print(
            f"{speed.codec:28s} {speed.times:5.2f} {speed.encode_gb_per_second:8.2f} ({speed.encode_fraction:.2f}) "
            f"{speed.decode_gb_per_second:15.2f} ({speed.decode_fraction:.2f}) {speed.break_even_gbit:18.1f}"
        )
    if options.out:
        options.out.write_text(json.dumps([asdict(speed) for speed in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()

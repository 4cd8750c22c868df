"""LMCache as the peer: does the benchmark's work in an interpreter of its own, one order and one answer a line.

    python _lmcache_peer.py        {"do": "lookup", ...} in, {"list_hit_s": ...} out; both JSON

It imports nothing of this project, so that its environment may hold whatever LMCache needs. On a machine without CUDA:

    python -m venv lmcache && lmcache/bin/pip install torch "numpy<2.3" "transformers>=5.4" "protobuf<7" "setuptools<81"
    lmcache/bin/pip install aiofile aiofiles aiohttp awscrt blake3 cachetools cryptography fastapi httptools httpx \
        msgspec numba nvtx opentelemetry-api==1.40.0 opentelemetry-exporter-otlp opentelemetry-exporter-prometheus \
        opentelemetry-sdk "prometheus_client<=0.24.1" psutil py-cpuinfo pyyaml pyzmq redis safetensors sortedcontainers
    lmcache/bin/pip install --no-deps lmcache==0.5.6

LMCache has no connector for KV in main memory: those here are the smallest that copy, and its own fallback for pages.
"""

# ruff: noqa: E402
# pyright: reportMissingImports=false

import json
import os
import statistics
import sys
import threading
import time

os.environ.update(LMCACHE_TRACK_USAGE="false", DO_NOT_TRACK="1", LMCACHE_LOG_LEVEL="ERROR", HF_HUB_OFFLINE="1")
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what LMCache prints is not an answer

import lmcache
import torch
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata

LAYERS, HEADS, HEAD_SIZE, CHUNK_TOKENS, BLOCK = 32, 8, 128, 256, 16
WIDTH = HEADS * HEAD_SIZE


class Dense(GPUConnectorInterface):
    """KV of a prompt in one tensor [2, layers, tokens, heads x head size]."""

    def __init__(self, kv_heads: int = HEADS, layers: int = LAYERS, head_size: int = HEAD_SIZE):
        self.layers, self.width = layers, kv_heads * head_size

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([2, self.layers, num_tokens, self.width])

    def from_gpu(self, memory_obj, start: int, end: int, *, kv, **_) -> None:
        memory_obj.tensor.copy_(kv[:, :, start:end])

    def to_gpu(self, memory_obj, start: int, end: int, *, kv, **_) -> None:
        kv[:, :, start:end].copy_(memory_obj.tensor)

    def batched_from_gpu(self, memory_objs, starts, ends, **more) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory_obj, start, end, **more)

    def batched_to_gpu(self, memory_objs, starts, ends, **more) -> None:
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(memory_obj, start, end, **more)


class Paged(Dense):
    """KV in vLLM's blocks [2, blocks, block size, heads, head size] a layer, moved by LMCache's own fallback."""

    def __init__(self, slots: torch.Tensor):
        super().__init__()
        self.slots = slots

    def from_gpu(self, memory_obj, start: int, end: int, *, kv, **_) -> None:
        self._move(memory_obj, start, end, kv, "D2H")

    def to_gpu(self, memory_obj, start: int, end: int, *, kv, **_) -> None:
        self._move(memory_obj, start, end, kv, "H2D")

    def _move(self, memory_obj, start: int, end: int, kv, direction: str) -> None:
        import lmcache.lmcache_native as native
        from lmcache import device_ops

        flat = [layer.view(2, -1, WIDTH) for layer in kv]
        device_ops.multi_layer_kv_transfer(
            memory_obj.tensor, flat, self.slots[start:end], torch.device("cpu"), flat[0].shape[1],
            getattr(native.TransferDirection, direction), native.EngineKVFormat.NL_X_TWO_NB_BS_NH_HS,
            block_size=BLOCK, head_size=HEAD_SIZE,
        )  # fmt: skip


class Nothing(Dense):
    """Moves nothing: what is left is the control path."""

    def batched_from_gpu(self, *args, **more) -> None:
        pass

    batched_to_gpu = batched_from_gpu


class Session:
    """One LMCache engine and the KV that goes in and out."""

    def __init__(self):
        self.serial, self.engine, self.name = 0, None, ""

    def build(self, connector: Dense, kv_heads: int = HEADS, head_size: int = HEAD_SIZE, **settings) -> None:
        self.serial += 1
        self.name = f"bench{self.serial}"
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK_TOKENS, local_cpu=True, lmcache_instance_id=self.name,
            pre_caching_hash_algorithm="builtin", **settings,
        )  # fmt: skip
        layers = connector.layers
        metadata = LMCacheMetadata(
            model_name="llama-like", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
            kv_dtype=torch.float16, kv_shape=(layers, 2, CHUNK_TOKENS, kv_heads, head_size), chunk_size=CHUNK_TOKENS,
        )  # fmt: skip
        self.engine = LMCacheEngineBuilder.get_or_create(self.name, config, metadata, connector, _nothing, _nothing)
        self.engine.post_init()

    def close(self) -> dict:
        """Does not wait: with Redis behind it, LMCache 0.5.6 does not come back from closing."""
        threading.Thread(target=LMCacheEngineBuilder.destroy, args=(self.name,), daemon=True).start()
        self.engine = self.source = self.target = None
        return {}

    # ---------------------------------------------------------------- lookup

    def lookup(self, tokens: int, repeats: int) -> dict:
        """Medians of seconds for a prompt whose every chunk is in memory, and for one that misses at once."""
        self.build(Nothing(1, 2, 16), 1, 16, max_local_cpu_size=0.3)
        prompt, other = _prompt(tokens), _prompt(tokens)
        as_tensor = torch.tensor(prompt)
        self.engine.store(prompt, kv=None)
        assert self.engine.lookup(prompt) == tokens and self.engine.lookup(other) == 0
        found = {
            "list_hit_s": _median(lambda: self.engine.lookup(prompt), repeats),
            "array_hit_s": _median(lambda: self.engine.lookup(as_tensor), repeats),
            "list_miss_s": _median(lambda: self.engine.lookup(other), repeats),
        }
        self.close()
        return found

    # ---------------------------------------------------------------- moves

    def open(self, source: str, chunks: int, disk: str = "", redis: int = 0) -> dict:
        """Make an engine and the KV of one prompt of so many chunks. source: "dense" or "paged"."""
        tokens = self.tokens = chunks * CHUNK_TOKENS
        if source == "paged":
            blocks = tokens // BLOCK + 8
            order = torch.randperm(blocks)[: tokens // BLOCK]
            slots = (order[:, None] * BLOCK + torch.arange(BLOCK)).flatten()
            connector, shape = Paged(slots), (2, blocks, BLOCK, HEADS, HEAD_SIZE)
            self.source = [torch.randn(*shape, dtype=torch.float16) for _ in range(LAYERS)]
            self.target = [torch.zeros(*shape, dtype=torch.float16) for _ in range(LAYERS)]
            self.same = lambda: all(torch.equal(a.view(2, -1, WIDTH)[:, slots], b.view(2, -1, WIDTH)[:, slots])
                                    for a, b in zip(self.source, self.target, strict=True))  # fmt: skip
        else:
            connector, shape = Dense(), (2, LAYERS, tokens, WIDTH)
            self.source = torch.randn(*shape, dtype=torch.float16)
            self.target = torch.zeros(*shape, dtype=torch.float16)
            self.same = lambda: torch.equal(self.source, self.target)
        nbytes = tokens * LAYERS * WIDTH * 4
        settings = {"max_local_cpu_size": 2.2 * nbytes / 2**30}
        if disk:
            settings |= {"local_disk": disk, "max_local_disk_size": 8.0}
        if redis:
            settings["remote_url"] = f"redis://127.0.0.1:{redis}"
        self.build(connector, **settings)
        self.slower = bool(disk or redis)
        self.copies = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
        return {"version": lmcache.__version__}

    def round(self) -> dict:
        """Copy, store, store again, retrieve, once each. With a slower tier a store ends when its bytes are there."""
        prompt = _prompt(self.tokens)
        found = {"copy_s": _seconds(lambda: self.copies[1].copy_(self.copies[0]))}
        found["store_s"] = _seconds(lambda: self._store(prompt))
        if not self.slower:
            found["again_s"] = _seconds(lambda: self._store(prompt))
        mask = []
        found["retrieve_s"] = _seconds(lambda: mask.append(self.engine.retrieve(prompt, kv=self.target)))
        found["exact"] = int(mask[0].sum()) == self.tokens and self.same()
        self._empty_memory(prompt)
        return found

    def _store(self, prompt: list[int]) -> None:
        self.engine.store(prompt, kv=self.source)
        if not self.slower:
            return
        for name, backend in self.engine.storage_manager.storage_backends.items():
            pending = getattr(backend, "disk_worker", backend) if name != "LocalCPUBackend" else None
            while pending is not None and pending.put_tasks:
                time.sleep(0.001)
        self._empty_memory(prompt)

    def _empty_memory(self, prompt: list[int]) -> None:
        """Clear LMCache's memory tier. What a write under way refers to stays, so this ends when no write is left."""
        memory = self.engine.storage_manager.storage_backends["LocalCPUBackend"]
        deadline = time.monotonic() + 30
        while True:
            memory.clear()
            if self.engine.lookup(prompt, search_range=["LocalCPUBackend"]) == 0:
                return
            if time.monotonic() > deadline:
                raise TimeoutError("chunks stay in memory 30 s after they were written")
            time.sleep(0.001)


def _nothing(*args) -> None:
    """Broadcasts to no other rank."""


def _prompt(tokens: int) -> list[int]:
    return torch.randint(0, 128_000, (tokens,)).tolist()


def _seconds(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _median(call, repeats: int) -> float:
    return statistics.median(_seconds(call) for _ in range(repeats))


def main() -> None:
    torch.set_num_threads(1)
    session = Session()
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer = getattr(session, order.pop("do"))(**order)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        ANSWERS.write(json.dumps(answer) + "\n")
        ANSWERS.flush()
    os._exit(0)  # engines that do not close must not keep this process


if __name__ == "__main__":
    main()

"""vLLM's own OffloadingConnector on vLLM's CPU backend, as a peer to measure against.

vLLM 0.32 ships workers for CUDA-like devices only. The scheduling, lookup and bookkeeping are vLLM's; what is added is
a worker that copies pages between the paged cache and host memory with whole-row index copies. `HostTieringSpec` puts
vLLM's file tier below that memory.
"""

import time

import numpy as np
import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

__all__ = ["HostOffloadingSpec", "HostTieringSpec"]


class HostWorker(OffloadingWorker):
    """Copies in the calling thread; a transfer is finished when it was submitted.

    Args:
        kv_caches: vLLM's canonical view of the paged cache.
        blocks_per_chunk: Blocks of one offloaded chunk.
        num_chunks: Capacity.
        region: Memory that vLLM's lower tiers read and write, too; without it the memory is this worker's own.
    """

    def __init__(self, kv_caches, blocks_per_chunk: int, num_chunks: int, region: SharedOffloadRegion | None = None):
        self._blocks_per_chunk, self._region = blocks_per_chunk, region
        self._pages = [c.tensor.view(torch.int8).view(-1, c.page_size_bytes) for c in kv_caches.tensors]
        self._chunks = [self._chunk_memory(num_chunks, pages.shape[1]) for pages in self._pages]
        self._groups = kv_caches.group_data_refs
        self._done: list[TransferResult] = []

    def _chunk_memory(self, num_chunks: int, page_bytes: int) -> torch.Tensor:
        """int8 (chunks, blocks of a chunk, bytes of a page)."""
        if self._region is None:
            return torch.zeros((num_chunks, self._blocks_per_chunk, page_bytes), dtype=torch.int8)
        view = self._region.create_next_worker_view(page_bytes * self._blocks_per_chunk)
        shape, strides = (view.shape[0], self._blocks_per_chunk, page_bytes), (view.stride(0), page_bytes, 1)
        return view.as_strided(shape, strides, view.storage_offset())

    def submit_store(self, job_id, src_spec, dst_spec) -> bool:
        return self._move(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id, src_spec, dst_spec) -> bool:
        return self._move(job_id, dst_spec, src_spec, store=False)

    def _move(self, job_id, paged, chunked, *, store: bool) -> bool:
        start, nbytes, at_page, at_chunk = time.perf_counter(), 0, 0, 0
        for references, size, first in zip(self._groups, paged.group_sizes, paged.block_indices, strict=True):
            if not size:
                continue
            places = first % self._blocks_per_chunk + np.arange(size)
            used = -(-int(places[-1] + 1) // self._blocks_per_chunk)
            blocks = torch.from_numpy(paged.block_ids[at_page : at_page + size].astype(np.int64))
            chunk_ids = chunked.block_ids[at_chunk : at_chunk + used].astype(np.int64)
            chunks = torch.from_numpy(chunk_ids[places // self._blocks_per_chunk])
            inside = torch.from_numpy(places % self._blocks_per_chunk)
            for reference in references:
                pages, stored = self._pages[reference.tensor_idx], self._chunks[reference.tensor_idx]
                if store:
                    stored[chunks, inside] = pages[blocks]
                else:
                    pages[blocks] = stored[chunks, inside]
                nbytes += pages.shape[1] * size
            at_page += size
            at_chunk += used
        self._done.append(TransferResult(job_id, True, nbytes, time.perf_counter() - start))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids) -> None:
        """Nothing is ever under way."""

    def shutdown(self) -> None:
        self._chunks.clear()
        if self._region is not None:
            self._region.cleanup()
            self._region = None


class HostOffloadingSpec(CPUOffloadingSpec):
    """vLLM's CPU offloading with a worker for host pages."""

    def get_worker(self, kv_caches):
        if not self._worker:
            self._worker = HostWorker(kv_caches, self.blocks_per_chunk, self.num_chunks)
        return self._worker


class HostTieringSpec(TieringOffloadingSpec):
    """vLLM's tiered offloading with a worker for host pages."""

    def get_worker(self, kv_caches):
        if not self._worker:
            region = SharedOffloadRegion(engine_id=self._engine_id, num_chunks=self.num_chunks,
                                         rank=self.config.parallel.rank, kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                                         cpu_page_size=self.cpu_page_size_per_worker)  # fmt: skip
            self._worker = HostWorker(kv_caches, self.blocks_per_chunk, self.num_chunks, region)
        return self._worker

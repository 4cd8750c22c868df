"""Any policy of the workbench as a cache policy of vLLM's own CPU offload.

    kv_connector_extra_config = {
        "eviction_policy": "wb_sieve",  # wb_ and any name that resolve_policy takes
        "cache_policy_module_path": "workbench.policies.vllm_offload",
    }

vLLM (0.32) looks the name up as an attribute of this module. Its offload knows blocks but not their parents, so the
order here is flat: what protects a prefix is the touch order, tail first. A block that is being loaded or stored is
pinned. vLLM calls this interface experimental.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus, order_request_keys

from workbench.policies.live import LivePolicy
from workbench.policies.names import resolve_policy

__all__ = ["WorkbenchCachePolicy", "offload_policy"]

PREFIX = "wb_"


class WorkbenchCachePolicy(CachePolicy):
    """vLLM's interface over one LivePolicy. A subclass names the policy; see offload_policy."""

    spec: Any = "lru"

    def __init__(self, cache_capacity: int):
        super().__init__(cache_capacity)
        self.clear()

    def clear(self) -> None:
        """Forget everything, pinned or not."""
        self._order = LivePolicy(self.spec, capacity_chunks=max(1, self.cache_capacity))
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        self._index: dict[OffloadKey, int] = {}
        self._key: dict[int, OffloadKey] = {}
        self._free = list(range(self.cache_capacity - 1, -1, -1))
        self._depths: dict[OffloadKey, int] = {}  # of blocks about to be inserted
        self._requests = 0

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        """The block's status, None if it is not here."""
        return self._chunks.get(key)

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Note how deep the blocks lie; they are inserted next."""
        for rank, key in enumerate(keys):
            position = req_context.get_offload_key_position(key)
            self._depths[key] = rank if position is None else position

    def insert(self, key: OffloadKey, chunk: ChunkStatus) -> None:
        """A block is allocated; it stays pinned until its store is complete."""
        c = self._free.pop()
        self._chunks[key], self._index[key], self._key[c] = chunk, c, key
        self._order.insert(c, key=bytes(key), depth=self._depths.pop(key, 0))
        if chunk.ref_cnt != 0:
            self._order.pin(c)

    def remove(self, key: OffloadKey) -> None:
        """A store failed."""
        c = self._index.pop(key)
        while self._order.pins(c):
            self._order.unpin(c)
        self._order.remove(c)
        del self._chunks[key], self._key[c]
        self._free.append(c)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """The blocks were used, by the GPU's own prefix cache for example."""
        self._finish([key for key in keys if key in self._index], frozenset())

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        """Tell the policy of the request's blocks, in touch order."""
        keys = [key for key in order_request_keys(key_groups, req_context) if key in self._index]
        self._finish(keys, insertion_only_keys)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Evict exactly n blocks that are neither pinned nor protected, or none and return None."""
        spared = sum(1 for key in protected if key in self._index and not self._order.pins(self._index[key]))
        if len(self._chunks) - self._order.pinned - spared < n:
            return None
        evicted = []
        for _ in range(n):
            c = self._order.victim(lambda c: self._key[c] in protected)
            key = self._key.pop(c)
            del self._index[key]
            evicted.append((key, self._chunks.pop(key)))
            self._free.append(c)
        return evicted

    def mark_evictable(self, key: OffloadKey) -> None:
        """The last transfer of the block ended."""
        self._order.unpin(self._index[key])

    def mark_non_evictable(self, key: OffloadKey) -> None:
        """The first transfer of the block began."""
        self._order.pin(self._index[key])

    def _finish(self, keys: list[OffloadKey], inserted_only: Iterable[OffloadKey]) -> None:
        self._order.start(self._requests, time.monotonic())
        self._requests += 1
        inserted = {self._index[key] for key in inserted_only if key in self._index}
        self._order.tell([self._index[key] for key in keys], inserted=inserted)


def offload_policy(spec: Any) -> type[WorkbenchCachePolicy]:
    """A class for vLLM's CachePolicyFactory.

    Args:
        spec: A policy class, instance or name; see resolve_policy.
    """
    chosen = resolve_policy(spec)
    return type(f"{type(chosen).__name__}CachePolicy", (WorkbenchCachePolicy,), {"spec": chosen})


def __getattr__(name: str) -> type[WorkbenchCachePolicy]:
    if name.startswith(PREFIX):
        return offload_policy(name.removeprefix(PREFIX))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; policies are named {PREFIX}lru and so on")

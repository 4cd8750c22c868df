"""The data plane: moves bytes on orders and reports what became of them. It decides nothing.

    Store   pages -> gather -> arena slot -> (queue) -> slower tiers
    Load    tier -> arena slot -> checked -> scatter -> pages
    Write   arena slot -> slower tier, before the slot is used anew
    Erase   (queue, behind the writes)

Gathers and scatters happen inside `run`, so no page is read or written after the caller took it back. Writes to slower
tiers happen in one thread behind a queue; the control plane holds the arena slot until the write is reported.
"""

import logging
import mmap
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import xxhash

from kernels.pages import PageTable, gather_pages, scatter_pages
from workbench.errors import CapacityError
from workbench.layout import KVLayout
from workbench.orders import STAGING, Done, Erase, Load, Order, Store, Write
from workbench.tiers.base import Tier

__all__ = ["Arena", "DataPlane"]

logger = logging.getLogger(__name__)


class Arena:
    """One anonymous mapping, cut into chunk-sized slots: the memory tier's bytes, then the staging slots.

    Args:
        layout: Shape of a chunk.
        slots: Slots of the memory tier.
        staging: Slots that chunks without a place in the memory tier pass through on their way to slower tiers.
        loading: The same for the way up.

    Raises:
        CapacityError: The machine does not have that much free memory.
    """

    def __init__(self, layout: KVLayout, slots: int, staging: int = 0, loading: int = 0):
        nbytes = max(1, slots + staging + loading) * layout.chunk_nbytes
        free = _free_memory_bytes()
        if nbytes > free:
            raise CapacityError(
                f"the memory tier asks for {nbytes / 2**30:.2f} GiB ({slots} chunks and {staging + loading} staging slots of "
                f"{layout.chunk_nbytes / 2**20:.1f} MiB); {free / 2**30:.2f} GiB are free"
            )
        self._map = mmap.mmap(-1, nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.chunks = np.frombuffer(self._map, np.uint8).reshape(-1, *layout.chunk_shape)
        self.contents: list[tuple[bytes, bytes] | None] = [None] * len(self.chunks)  # (key, tokens) of each slot
        self.loading = range(slots + staging, slots + staging + loading)
        self._staging = list(range(slots, slots + staging))
        self._lock = threading.Lock()

    def borrow(self) -> int:
        """A staging slot, or STAGING when all are taken."""
        with self._lock:
            return self._staging.pop() if self._staging else STAGING

    def give_back(self, slot: int) -> None:
        with self._lock:
            self._staging.append(slot)


def _free_memory_bytes() -> int:
    import psutil

    return psutil.virtual_memory().available


class DataPlane:
    """Carries out orders over one arena, a stack of slower tiers and a paged KV cache.

    Args:
        layout: Shape of a chunk.
        memory_slots: Slots of the memory tier; 0 without one.
        tiers: The slower tiers, fastest first. Their levels count from 1 behind a memory tier, else from 0.
        staging_slots: Chunks that may be on their way to slower tiers without a place in the memory tier; more are
            dropped, and counted.
        threads: Threads that read from slower tiers at a time.
        verify: Keep a digest of each stored chunk and compare the pages after every load. Costs one pass over the
            bytes each way; for tests and for tracking down a fault.
    """

    def __init__(self, layout: KVLayout, *, memory_slots: int, tiers: Sequence[Tier] = (), staging_slots: int = 8,
                 threads: int = 2, verify: bool = False):  # fmt: skip
        self.layout, self.verify = layout, verify
        self.first_level = 1 if memory_slots else 0
        self.tiers = list(tiers)
        self.arena = Arena(layout, memory_slots, staging_slots if tiers else 0, 4 * threads if tiers else 0)
        self.bad_blocks: set[int] = set()
        self.verified_loads = 0
        self._digests: dict[bytes, bytes] = {}
        self._pages: PageTable | None = None
        self._tainted: dict[str, int] = {}
        self._step_tainted = False
        self._report: list[Done] = []
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._idle = threading.Condition(self._lock)
        self._queued = 0
        self._readers = ThreadPoolExecutor(threads, thread_name_prefix="kv-read") if tiers else None
        self._writer = threading.Thread(target=self._write_loop, name="kv-write", daemon=True)
        self._closed = False
        self._writer.start()

    def attach(self, pages: PageTable) -> None:
        """The paged KV cache that gathers read and scatters fill."""
        self._pages = pages

    def begin_step(self) -> None:
        """A new forward pass: a load that failed in the last one no longer taints what is stored."""
        self._step_tainted = False

    def run(self, orders: Sequence[Order]) -> None:
        """Carry out orders in turn; neighbours of one kind move in one launch. Outcomes come with `take_report`."""
        batch: list = []
        for order in orders:
            if batch and type(order) is not type(batch[0]):
                self._run_batch(batch)
                batch = []
            batch.append(order)
        if batch:
            self._run_batch(batch)

    def take_report(self) -> list[Done]:
        """What has been done since the last call."""
        with self._lock:
            report, self._report = self._report, []
        return report

    def take_bad_blocks(self) -> set[int]:
        """Blocks that a failed load left without valid KV, since the last call."""
        bad, self.bad_blocks = self.bad_blocks, set()
        return bad

    def forget_request(self, request: str) -> None:
        self._tainted.pop(request, None)

    def flush(self, timeout: float = 60.0) -> bool:
        """Wait until every queued write is done; False when the time ran out first."""
        with self._idle:
            return self._idle.wait_for(lambda: self._queued == 0, timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Finish the queued writes as far as the time allows and release everything; twice is fine."""
        if self._closed:
            return
        self._closed = True
        self.flush(timeout)
        self._queue.put(None)
        self._writer.join(max(0.1, timeout))
        if self._readers is not None:
            self._readers.shutdown(wait=False, cancel_futures=True)
        for tier in self.tiers:
            tier.close()

    # ---------------------------------------------------------------- one kind of order at a time

    def _run_batch(self, batch: Sequence[Order]) -> None:
        match batch[0]:
            case Store():
                self._run_stores(batch)
            case Load():
                self._run_loads(batch)
            case Write():
                for order in batch:
                    self._write(order.chunk, order.slot, order.level, "", 0)
            case Erase():
                for order in batch:
                    self._enqueue(order)

    def _run_stores(self, orders: Sequence[Store]) -> None:
        wanted: list[tuple[Store, int]] = []
        for order in orders:
            if self._step_tainted or order.attempt <= self._tainted.get(order.request, -1):
                self._refuse(order, "tainted")
            elif (slot := order.slot if order.slot != STAGING else self.arena.borrow()) == STAGING:
                self._refuse(order, "queue full")
            else:
                wanted.append((order, slot))
        if not wanted:
            return
        start = time.perf_counter()
        slots = np.array([slot for _, slot in wanted], np.int64)
        gather_pages(self._pages, np.array([o.blocks for o, _ in wanted], np.int64), self.arena.chunks, slots)
        seconds = (time.perf_counter() - start) / len(wanted)
        for order, slot in wanted:
            self.arena.contents[slot] = (order.chunk.key, order.chunk.tokens)
            if self.verify:
                self._digests[order.chunk.key] = xxhash.xxh3_128_digest(self.arena.chunks[slot])
            if order.slot != STAGING:
                self._done("store", order, 0, self.layout.chunk_nbytes, seconds, "")
            if order.write_to:
                self._enqueue((order, slot))

    def _refuse(self, order: Store, reason: str) -> None:
        if order.slot != STAGING:
            self._done("store", order, 0, 0, 0.0, reason)
        for level in order.write_to:
            self._done("write", order, level, 0, 0.0, reason)

    def _run_loads(self, orders: Sequence[Load]) -> None:
        """Chunks with an arena slot move in one launch; those that only pass through, as many as there are slots."""
        passing = [order for order in orders if order.slot == STAGING]
        staying = [order for order in orders if order.slot != STAGING]
        if staying:
            self._load_wave(staying, [order.slot for order in staying])
        for at in range(0, len(passing), max(1, len(self.arena.loading))):
            wave = passing[at : at + len(self.arena.loading)]
            self._load_wave(wave, self.arena.loading[: len(wave)])

    def _load_wave(self, orders: Sequence[Load], slots: Sequence[int]) -> None:
        start = time.perf_counter()
        reasons = self._fetch(orders, slots)
        good = [i for i, reason in enumerate(reasons) if not reason]
        if good:
            blocks = np.array([orders[i].blocks for i in good], np.int64)
            scatter_pages(self.arena.chunks, np.array([slots[i] for i in good], np.int64), self._pages, blocks)
        seconds = (time.perf_counter() - start) / len(orders)
        for order, reason in zip(orders, reasons, strict=True):
            if not reason and self.verify:
                reason = self._check_pages(order)
            if reason:
                self._load_failed(order)
            moved = sum(block >= 0 for block in order.blocks) * self.layout.page_nbytes * self.layout.num_layers
            self._done("load", order, order.level, 0 if reason else moved, seconds, reason)

    def _fetch(self, orders: Sequence[Load], slots: Sequence[int]) -> list[str]:
        """Bring each chunk into its slot; "" or the reason why not."""
        if all(order.level < self.first_level for order in orders):
            return [self._check_slot(order, slot) for order, slot in zip(orders, slots, strict=True)]
        return list(self._readers.map(self._fetch_one, orders, slots))

    def _fetch_one(self, order: Load, slot: int) -> str:
        if order.level < self.first_level:
            return self._check_slot(order, slot)
        reason = self.tiers[order.level - self.first_level].read(order.chunk, self.arena.chunks[slot].reshape(-1))
        self.arena.contents[slot] = None if reason else (order.chunk.key, order.chunk.tokens)
        return reason

    def _check_slot(self, order: Load, slot: int) -> str:
        contents = self.arena.contents[slot]
        if contents is None:
            return "absent"
        return "" if contents == (order.chunk.key, order.chunk.tokens) else "mismatch"

    def _check_pages(self, order: Load) -> str:
        """Compare what now lies in the pages with the digest of what was stored, where the whole chunk was loaded."""
        expected = self._digests.get(order.chunk.key)
        if expected is None or min(order.blocks) < 0:
            return ""
        copy = np.empty((1, *self.layout.chunk_shape), np.uint8)
        gather_pages(self._pages, np.array([order.blocks], np.int64), copy, np.zeros(1, np.int64))
        self.verified_loads += 1
        return "" if xxhash.xxh3_128_digest(copy) == expected else "corrupt"

    def _load_failed(self, order: Load) -> None:
        self._step_tainted = True
        self._tainted[order.request] = max(order.attempt, self._tainted.get(order.request, -1))
        self.bad_blocks.update(block for block in order.blocks if block >= 0)

    # ---------------------------------------------------------------- the writing thread

    def _enqueue(self, work: object) -> None:
        with self._lock:
            self._queued += 1
        self._queue.put(work)

    def _write_loop(self) -> None:
        while (work := self._queue.get()) is not None:
            if isinstance(work, Erase):
                self.tiers[work.level - self.first_level].erase(work.key)
            else:
                order, slot = work
                for level in order.write_to:
                    self._write(order.chunk, slot, level, order.request, order.attempt)
                if order.slot == STAGING:
                    self.arena.give_back(slot)
            with self._idle:
                self._queued -= 1
                self._idle.notify_all()

    def _write(self, chunk, slot: int, level: int, request: str, attempt: int) -> None:
        start = time.perf_counter()
        payload = self.arena.chunks[slot].reshape(-1)
        try:
            reason, nbytes = self.tiers[level - self.first_level].write(chunk, payload)
        except Exception as error:  # a tier breaks its promise: the chunk is lost to it, the thread must live on
            logger.exception("tier %s raised while writing", self.tiers[level - self.first_level].name)
            reason, nbytes = f"raised {type(error).__name__}", 0
        done = Done("write", request, attempt, chunk.key, level, nbytes, time.perf_counter() - start, reason)
        with self._lock:
            self._report.append(done)

    def _done(self, kind: str, order: Store | Load, level: int, nbytes: int, seconds: float, reason: str) -> None:
        done = Done(kind, order.request, order.attempt, order.chunk.key, level, nbytes, seconds, reason)
        with self._lock:
            self._report.append(done)

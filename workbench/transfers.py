"""The data plane: moves bytes on orders and reports what became of them. It decides nothing.

    Store   pages -> gather -> arena slot -> (queue) -> slower tiers
    Load    tier -> arena slot -> checked -> scatter -> pages
    Write   arena slot -> (staging slot, if its slot is used anew) -> (queue) -> slower tier
    Erase   (queue, behind the writes)

Gathers and scatters happen inside `run`, so no page is read or written after the caller took it back. Each slower tier
has a thread and a bounded queue of its own, so that a slow one holds up neither the caller nor its neighbours; what
finds the queue full is dropped and counted. The control plane holds the arena slot until the write is reported, and a
slot that a queued write has still to read is not filled anew whatever the control plane says.
"""

import logging
import mmap
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np
import xxhash

from kernels.pages import PageTable, gather_pages, scatter_pages
from workbench.chunks import Chunk
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
                f"the memory tier asks for {nbytes / 2**30:.2f} GiB ({slots} chunks and {staging + loading} staging "
                f"slots of {layout.chunk_nbytes / 2**20:.1f} MiB); {free / 2**30:.2f} GiB are free"
            )
        self._map = mmap.mmap(-1, nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.chunks = np.frombuffer(self._map, np.uint8).reshape(-1, *layout.chunk_shape)
        self.contents: list[Chunk | None] = [None] * len(self.chunks)  # None: empty, or being filled
        self.leaving = [0] * len(self.chunks)  # queued writes that will read each slot
        self.loading = range(slots + staging, slots + staging + loading)
        self._staging_slots = range(slots, slots + staging)
        self._staging = list(self._staging_slots)
        self._lock = threading.Lock()

    def borrow(self) -> int:
        """A staging slot, or STAGING when all are taken."""
        with self._lock:
            return self._staging.pop() if self._staging else STAGING

    def give_back(self, slot: int) -> None:
        """Return a staging slot; a slot of the memory tier is none and stays where it is."""
        if slot in self._staging_slots:
            with self._lock:
                self._staging.append(slot)


def _free_memory_bytes() -> int:
    import psutil

    return psutil.virtual_memory().available


class _Leaving(NamedTuple):
    """A slot that a slower tier has still to read."""

    key: bytes
    slot: int
    level: int
    request: str
    attempt: int


class DataPlane:
    """Carries out orders over one arena, a stack of slower tiers and a paged KV cache.

    Args:
        layout: Shape of a chunk.
        memory_slots: Slots of the memory tier; 0 without one.
        tiers: The slower tiers, fastest first. Their levels count from 1 behind a memory tier, else from 0.
        staging_slots: Chunks that may be on their way to slower tiers without a place in the memory tier; more are
            dropped, and counted.
        threads: Threads that read from slower tiers at a time.
        load_seconds: The longest that a request waits for chunks from slower tiers; what is late is a miss.
        verify: Keep a digest of each stored chunk and compare the pages after every load. Costs one pass over the
            bytes each way; for tests and for tracking down a fault.
    """

    def __init__(self, layout: KVLayout, *, memory_slots: int, tiers: Sequence[Tier] = (), staging_slots: int = 8,
                 threads: int = 2, load_seconds: float = 5.0, verify: bool = False):  # fmt: skip
        self.layout, self.verify, self.threads, self.load_seconds = layout, verify, threads, load_seconds
        self.first_level = 1 if memory_slots else 0
        self.tiers = list(tiers)
        self.arena = Arena(layout, memory_slots, staging_slots if tiers else 0, 4 * threads if tiers else 0)
        self.bad_blocks: set[int] = set()
        self.verified_loads = 0
        self._digests: dict[bytes, bytes] = {}
        self._pages: PageTable | None = None
        self._page_locked: bool | None = None  # whether a GPU reaches the arena directly; not asked yet
        self._tainted: dict[str, int] = {}
        self._step_tainted = False
        self._refused: set[bytes] = set()  # chunks whose store was refused in this run
        self._report: list[Done] = []
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._queues: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in self.tiers]
        self._queued = [0] * len(self.tiers)
        self._most_queued = max(staging_slots, memory_slots // 2)
        self._readers = ThreadPoolExecutor(threads, thread_name_prefix="kv-read") if tiers else None
        self._closed = False
        self._abandoned = False  # closed with writes in the queue: they are not carried out any more
        self._writers = [
            threading.Thread(target=self._write_loop, args=(number,), name=f"kv-write-{tier.name}", daemon=True)
            for number, tier in enumerate(self.tiers)
        ]
        for writer in self._writers:
            writer.start()

    def attach(self, pages: PageTable) -> None:
        """The paged KV cache that gathers read and scatters fill."""
        if pages is self._pages:
            return
        self._pages = pages
        if pages.is_cuda and self._page_locked is None:
            from kernels.pages_triton import pin

            self._page_locked = pin(self.arena.chunks)
        chunk, slot = np.zeros((1, *self.layout.chunk_shape), np.uint8), np.zeros(1, np.int64)
        nothing = np.full((1, self.layout.blocks_per_chunk), -1, np.int64)
        gather_pages(pages, nothing, chunk, slot)  # compiles now, not within the first request
        if pages.writable:
            scatter_pages(chunk, slot, pages, nothing)

    def any_pages(self) -> PageTable:
        """The attached pages, or pages that nothing is moved to, for loads that only rise."""
        if self._pages is None:
            shape = (1, self.layout.page_nbytes)
            return PageTable([np.zeros(shape, np.uint8) for _ in range(self.layout.num_layers)])
        return self._pages

    def begin_step(self) -> None:
        """A new forward pass: a load that failed in the last one no longer taints what is stored."""
        self._step_tainted = False

    def run(self, orders: Sequence[Order]) -> None:
        """Carry out orders in turn; neighbours of one kind move in one launch. Outcomes come with `take_report`."""
        batch: list = []
        self._refused.clear()
        for order in orders:
            if batch and type(order) is not type(batch[0]):
                self._run_batch(batch)
                batch = []
            batch.append(order)
        if batch:
            self._run_batch(batch)

    @property
    def has_report(self) -> bool:
        """Whether `take_report` would give anything now."""
        return bool(self._report)

    def take_report(self) -> list[Done]:
        """What has been done since the last call."""
        with self._lock:
            report, self._report = self._report, []
        return report

    def queued(self, level: int) -> int:
        """Writes and erasures that wait for a slower tier; 0 for the arena."""
        return self._queued[level - self.first_level] if level >= self.first_level else 0

    def take_bad_blocks(self) -> set[int]:
        """Blocks that a failed load left without valid KV, since the last call."""
        bad, self.bad_blocks = self.bad_blocks, set()
        return bad

    def forget_request(self, request: str) -> None:
        self._tainted.pop(request, None)

    def flush(self, timeout: float = 60.0) -> bool:
        """Wait until every queued write is done; False when the time ran out first."""
        with self._idle:
            return self._idle.wait_for(lambda: not any(self._queued), timeout)

    def close(self, timeout: float = 5.0) -> None:
        """Finish the queued writes as far as the time allows and release everything; twice is fine."""
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + timeout
        self._abandoned = not self.flush(timeout)
        for waiting in self._queues:
            waiting.put(None)
        for writer in self._writers:
            writer.join(max(0.1, deadline - time.monotonic()))
        if self._readers is not None:
            self._readers.shutdown(wait=False, cancel_futures=True)
        for tier in self.tiers:
            tier.close()
        if self._page_locked:
            from kernels.pages_triton import unpin

            unpin(self.arena.chunks)
            self._page_locked = False

    # ---------------------------------------------------------------- one kind of order at a time

    def _run_batch(self, batch: Sequence[Order]) -> None:
        match batch[0]:
            case Store():
                self._run_stores(batch)
            case Load():
                self._run_loads(batch)
            case Write():
                for order in batch:
                    if order.stays:
                        self._write_down(order)
                    else:
                        self._demote(order)
            case Erase():
                for order in batch:
                    self._enqueue(order.level, order)

    def _run_stores(self, orders: Sequence[Store]) -> None:
        wanted: list[tuple[Store, int]] = []
        for order in orders:
            if self._step_tainted or order.attempt <= self._tainted.get(order.request, -1):
                self._refuse(order, "tainted")
            elif min(order.blocks) < 0:
                self._refuse(order, "no block")
            elif order.chunk.parent in self._refused:
                self._refuse(order, "prefix not stored")
            elif order.slot != STAGING and self.arena.leaving[order.slot]:
                self._refuse(order, "slot busy")
            elif (slot := order.slot if order.slot != STAGING else self.arena.borrow()) == STAGING:
                self._refuse(order, "queue full")
            else:
                wanted.append((order, slot))
        if not wanted:
            return
        start = time.perf_counter()
        if reason := self._gather(wanted):
            for order, slot in wanted:
                if order.slot == STAGING:
                    self.arena.give_back(slot)
                self._refuse(order, reason)
            return
        seconds = (time.perf_counter() - start) / len(wanted)
        for order, slot in wanted:
            self.arena.contents[slot] = order.chunk
            if self.verify:
                self._digests[order.chunk.key] = xxhash.xxh3_128_digest(self._payload(slot, order.chunk))
            if order.slot != STAGING:
                moved = len(order.blocks) * self.layout.page_nbytes * self.layout.num_layers
                self._done("store", order, 0, moved, seconds, "")
            self._write_through(order, slot)

    def _write_through(self, order: Store, slot: int) -> None:
        """Queue a gathered chunk for slower tiers. One that lies in the arena can do without them; others are bounded
        by the staging slots already."""
        levels = [level for level in order.write_to if order.slot == STAGING or self._has_room(level)]
        for level in order.write_to:
            if level not in levels:
                self._done("write", order, level, 0, 0.0, "queue full")
        with self._lock:
            self.arena.leaving[slot] += len(levels)  # all of them, before the first may be done
        for level in levels:
            self._enqueue(level, _Leaving(order.chunk.key, slot, level, order.request, order.attempt))

    def _has_room(self, level: int) -> bool:
        return self._queued[level - self.first_level] < self._most_queued

    def _write_down(self, order: Write) -> None:
        """Queue a chunk of the arena for a tier below, if there is room in the queue."""
        leaving = _Leaving(order.chunk.key, order.slot, order.level, "", 0)
        if not self._has_room(order.level):
            self._done("write", leaving, order.level, 0, 0.0, "queue full")
            return
        with self._lock:
            self.arena.leaving[order.slot] += 1
        self._enqueue(order.level, leaving)

    def _demote(self, order: Write) -> None:
        """Copy a chunk aside, because its slot is about to be used anew, and queue it for the tier below."""
        chunk, slot = self.arena.contents[order.slot], self.arena.borrow()
        leaving = _Leaving(order.chunk.key, slot, order.level, "", 0)
        if slot != STAGING and chunk is not None:
            self.arena.chunks[slot] = self.arena.chunks[order.slot]
            self.arena.contents[slot] = chunk
            with self._lock:
                self.arena.leaving[slot] += 1
            self._enqueue(order.level, leaving)
            return
        if slot != STAGING:
            self.arena.give_back(slot)
        if self.tiers[order.level - self.first_level].shared:
            self._done("write", leaving, order.level, 0, 0.0, "queue full")
        else:  # a local tier is worth the wait: the last copy of a chunk is at stake
            self.flush()
            self._write(leaving._replace(slot=order.slot))

    def _gather(self, wanted: Sequence[tuple[Store, int]]) -> str:
        for _, slot in wanted:
            self.arena.contents[slot] = None
        slots = np.array([slot for _, slot in wanted], np.int64)
        try:
            gather_pages(self._pages, self._rows([o.blocks for o, _ in wanted]), self.arena.chunks, slots)
        except (ValueError, RuntimeError) as error:  # blocks that the pages do not have, a GPU without free memory
            logger.exception("pages could not be gathered")  # every order is answered, or its slot is lost
            return f"raised {type(error).__name__}"
        return ""

    def _refuse(self, order: Store, reason: str) -> None:
        self._refused.add(order.chunk.key)
        if order.slot != STAGING:
            self._done("store", order, 0, 0, 0.0, reason)
        for level in order.write_to:
            self._done("write", order, level, 0, 0.0, reason)

    def _run_loads(self, orders: Sequence[Load]) -> None:
        """Chunks with an arena slot move in one launch; those that only pass through, as many as there are slots."""
        for group in _apart(orders):
            passing = [order for order in group if order.slot == STAGING]
            staying = [order for order in group if order.slot != STAGING]
            if staying:
                self._load_wave(staying, [order.slot for order in staying])
            width = len(self.arena.loading) or len(passing)
            for at in range(0, len(passing), width or 1):
                wave = passing[at : at + width]
                self._load_wave(wave, self.arena.loading[: len(wave)] or [STAGING] * len(wave))

    def _load_wave(self, orders: Sequence[Load], slots: Sequence[int]) -> None:
        start = time.perf_counter()
        reasons = self._fetch(orders, slots)
        good = [i for i, reason in enumerate(reasons) if not reason]
        if good and (fault := self._scatter([slots[i] for i in good], [orders[i].blocks for i in good])):
            reasons = [reason or fault for reason in reasons]
        seconds = (time.perf_counter() - start) / len(orders)
        for order, reason in zip(orders, reasons, strict=True):
            if not reason and self.verify and (reason := self._check_pages(order)) and order.level >= self.first_level:
                self.tiers[order.level - self.first_level].erase(order.chunk.key)
            if reason:
                self._load_failed(order)
            moved = sum(block >= 0 for block in order.blocks) * self.layout.page_nbytes * self.layout.num_layers
            self._done("load", order, order.level, 0 if reason else moved, seconds, reason)

    def _scatter(self, slots: Sequence[int], blocks: Sequence[tuple[int, ...]]) -> str:
        try:
            scatter_pages(self.arena.chunks, np.array(slots, np.int64), self._pages, self._rows(blocks))
        except (ValueError, RuntimeError) as error:
            logger.exception("pages could not be scattered")
            return f"raised {type(error).__name__}"
        return ""

    def _rows(self, blocks: Sequence[tuple[int, ...]]) -> np.ndarray:
        """Block ids, one row a chunk; those of a chunk that is not full are followed by -1."""
        width = self.layout.blocks_per_chunk
        if any(len(own) < width for own in blocks):
            blocks = [own + (-1,) * (width - len(own)) for own in blocks]
        return np.array(blocks, np.int64)

    def _payload(self, slot: int, chunk: Chunk) -> np.ndarray:
        """A chunk's bytes in its slot, one row: of a full chunk the slot itself, else a copy of the blocks it fills."""
        return self.arena.chunks[slot, :, : self.layout.blocks_of(chunk.num_tokens)].reshape(-1)

    def _fetch(self, orders: Sequence[Load], slots: Sequence[int]) -> list[str]:
        """Bring each chunk into its slot; "" or the reason why not."""
        if all(order.level < self.first_level for order in orders):
            return [self._check_slot(order, slot) for order, slot in zip(orders, slots, strict=True)]
        pool = self._readers
        reads = [pool.submit(self._fetch_one, order, slot) for order, slot in zip(orders, slots, strict=True)]
        late = wait(reads, timeout=self.load_seconds).not_done
        reasons = [
            self._give_up(read, order, slot) if read in late else read.result()
            for read, order, slot in zip(reads, orders, slots, strict=True)
        ]
        if late:  # its threads may be stuck for good
            pool.shutdown(wait=False)
            self._readers = ThreadPoolExecutor(self.threads, thread_name_prefix="kv-read")
        return reasons

    def _give_up(self, read: Future, order: Load, slot: int) -> str:
        """A read that takes too long is a miss. Nobody uses its slot until it ends; its tier is left alone."""
        if not read.cancel():
            with self._lock:
                self.arena.leaving[slot] += 1
            read.add_done_callback(lambda _: self._left(slot))
        if order.level >= self.first_level and (breaker := self.tiers[order.level - self.first_level].breaker):
            breaker.trip("timeout")
        return "timeout"

    def _fetch_one(self, order: Load, slot: int) -> str:
        if order.level < self.first_level:
            return self._check_slot(order, slot)
        if self.arena.leaving[slot]:
            return "slot busy"
        tier = self.tiers[order.level - self.first_level]
        self.arena.contents[slot] = None
        try:
            payload = self._payload(slot, order.chunk)
            reason = tier.read(order.chunk, payload)
            if not reason and payload.nbytes < self.layout.chunk_nbytes:
                blocks = self.arena.chunks[slot, :, : self.layout.blocks_of(order.chunk.num_tokens)]
                blocks[:] = payload.reshape(blocks.shape)
        except Exception as error:  # a tier breaks its promise: a miss, not an end of the request
            logger.exception("tier %s raised while reading", tier.name)
            reason = f"raised {type(error).__name__}"
        self.arena.contents[slot] = None if reason else order.chunk
        if not tier.exact:
            self._digests.pop(order.chunk.key, None)  # what is loaded is near what was stored, not equal to it
        return reason

    def _check_slot(self, order: Load, slot: int) -> str:
        contents = self.arena.contents[slot]
        if order.slot == STAGING or contents is None:
            return "absent"
        return "" if contents == order.chunk else "mismatch"

    def _check_pages(self, order: Load) -> str:
        """Compare what now lies in the pages with the digest of what was stored, where the whole chunk was loaded."""
        expected = self._digests.get(order.chunk.key)
        if expected is None or min(order.blocks) < 0:
            return ""
        copy = np.empty((1, *self.layout.chunk_shape), np.uint8)
        gather_pages(self._pages, self._rows([order.blocks]), copy, np.zeros(1, np.int64))
        self.verified_loads += 1
        copy = np.ascontiguousarray(copy[:, :, : len(order.blocks)])
        return "" if xxhash.xxh3_128_digest(copy) == expected else "corrupt"

    def _load_failed(self, order: Load) -> None:
        self._step_tainted = True
        self._tainted[order.request] = max(order.attempt, self._tainted.get(order.request, -1))
        self.bad_blocks.update(block for block in order.blocks if block >= 0)

    # ---------------------------------------------------------------- the writing threads

    def _enqueue(self, level: int, work: "Erase | _Leaving") -> None:
        number = level - self.first_level
        with self._idle:
            self._queued[number] += 1
        self._queues[number].put(work)

    def _write_loop(self, number: int) -> None:
        while (work := self._queues[number].get()) is not None:
            if isinstance(work, Erase):
                self._erase(work)
            else:
                self._write(work)
                self._left(work.slot)
            with self._idle:
                self._queued[number] -= 1
                self._idle.notify_all()

    def _left(self, slot: int) -> None:
        """One tier less has to read a slot; after the last one a staging slot is free again."""
        with self._lock:
            self.arena.leaving[slot] -= 1
            last = not self.arena.leaving[slot]
        if last:
            self.arena.give_back(slot)

    def _erase(self, order: Erase) -> None:
        tier = self.tiers[order.level - self.first_level]
        try:
            if not self._abandoned:
                tier.erase(order.key)
        except Exception:  # a tier breaks its promise; the thread must live on
            logger.exception("tier %s raised while erasing", tier.name)

    def _write(self, work: "_Leaving") -> None:
        """Copy a slot into a slower tier, if it still holds the chunk that it should."""
        start, nbytes = time.perf_counter(), 0
        chunk, tier = self.arena.contents[work.slot], self.tiers[work.level - self.first_level]
        if chunk is None or chunk.key != work.key:
            reason = "slot lost"
        elif self._abandoned:
            reason = "closed"
        else:
            reason, nbytes = self._write_to(tier, chunk, self._payload(work.slot, chunk))
        self._done("write", work, work.level, nbytes, time.perf_counter() - start, reason)

    def _write_to(self, tier: Tier, chunk: Chunk, payload: np.ndarray) -> tuple[str, int]:
        try:
            reason, nbytes = tier.write(chunk, payload)
        except Exception as error:  # a tier breaks its promise: the chunk is lost to it, the thread must live on
            logger.exception("tier %s raised while writing", tier.name)
            return f"raised {type(error).__name__}", 0
        if reason == "dedup":
            self._digests.pop(chunk.key, None)  # what lies there was stored by somebody else, maybe on other hardware
        return reason, nbytes

    def _done(self, kind: str, what: "Store | Load | _Leaving", level: int, nbytes: int, seconds: float,
              reason: str) -> None:  # fmt: skip
        key = what.key if isinstance(what, _Leaving) else what.chunk.key
        done = Done(kind, what.request, what.attempt, key, level, nbytes, seconds, reason)
        with self._lock:
            self._report.append(done)


def _apart(orders: Sequence[Load]) -> Iterator[list[Load]]:
    """Cut a list of loads wherever one would use a slot or a block again: one launch moves each place once."""
    group: list[Load] = []
    slots: set[int] = set()
    blocks: set[int] = set()
    for order in orders:
        wanted = {block for block in order.blocks if block >= 0}
        if order.slot in slots or wanted & blocks:
            yield group
            group, slots, blocks = [], set(), set()
        group.append(order)
        blocks |= wanted
        if order.slot != STAGING:
            slots.add(order.slot)
    if group:
        yield group

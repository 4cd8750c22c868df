"""The control plane: decides what is looked up, loaded, stored, written down and evicted. It holds no bytes.

lookup    chain -> index -> the longest prefix whose every chunk is resident somewhere -> a chunk that goes on alike
loads     hold each chunk where it lies -> an arena slot for what comes from below -> Load orders
stores    new chunk -> room in the arena (victims go down or out) -> room below -> Store orders
apply     what the data plane confirms becomes resident; what failed is taken back
finish    the request's chunks enter each tier's order, the last one as the oldest, and are let go
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np

from workbench.beginnings import Beginnings
from workbench.chunks import Chunk, ChunkChain
from workbench.errors import InvalidInputError
from workbench.events import Recorder
from workbench.index import ChunkIndex
from workbench.layout import KVLayout
from workbench.orders import STAGING, Done, Erase, Load, Order, Store, Write
from workbench.tiers.base import Changes, StoredChunk, TierIndex
from workbench.tiers.presence import Presence

__all__ = ["ControlPlane", "Deadlines", "WRITE_MODES"]

WRITE_MODES = ("through", "back")

# After these the bytes under the key are known to be no good; after any other fault they may well be right next time.
_BAD_BYTES = ("corrupt", "mismatch", "absent", "mac", "WRONGTYPE")

_AWAY_SECONDS = 1.0  # then a load may find out whether the tier works again
_ADOPTED_AT_ONCE = 500  # chunks, a few milliseconds
_REMEMBERED_DEPARTURES = 100_000
_REMEMBERED_PROMPTS = 64
_LEAST_PART = 4  # a part of a chunk is worth moving from this fraction of a full one on: a tier gives it as a whole
_LEAST_IN_MEMORY = 16  # or from so many tokens on out of the arena, of which only the blocks in question are moved
_LOOKED_AT = 8  # chunks that begin alike, before the search for one that is resident ends


@dataclass
class _Running:
    """One admitted request."""

    name: str
    chain: ChunkChain
    attempt: int = 0
    planned: int = 0  # chunks whose store is ordered or not needed
    heard: float = 0.0  # when the request last gave a sign of life
    used: dict[bytes, int] = field(default_factory=dict)  # key of a chunk -> its entry; settled at the end
    borrowed: list[int] = field(default_factory=list)  # entries of chunks of which it used only the beginning
    holds: list[tuple[TierIndex, int]] = field(default_factory=list)


class _Further(NamedTuple):
    """A stored chunk that a prompt follows from its start on, and where, at its end or before, they part."""

    chunk: Chunk
    stop: int


class Deadlines(NamedTuple):
    """Seconds after which the control plane stops waiting: a message that was lost must not hold room for ever."""

    order: float = 60.0  # a store or a load without an answer is taken back
    request: float = 600.0  # a request without a sign of life is over


class ControlPlane:
    """Index, capacity, order and orders.

    Args:
        layout: Shape of the KV.
        tiers: Fastest first. With `arena`, the first one is the data plane's memory arena.
        arena: Whether the first tier is the arena.
        write: "through": a stored chunk is written to every tier at once; "back": it goes down when it is evicted.
        shared: Levels that other engines use too, with what is known of their contents. What lies only there is asked
            for again at each lookup, and an eviction there is only forgetting: others may count on the chunk.
        record: Takes the events.
        recompute_seconds: Estimate for the tokens start..stop of a prompt, for policies that weigh cost.
        clock: Seconds, monotonic; only differences are used.
        deadlines: How long an order may go unanswered, and a request be silent.
        partial_hits: Whether a hit may end within a stored chunk.
    """

    def __init__(self, layout: KVLayout, tiers: Sequence[TierIndex], *, arena: bool, write: str = "through",
                 shared: Mapping[int, Presence] | None = None, record: Recorder | None = None,
                 recompute_seconds: Callable[[int, int], float] = lambda a, b: 0.0,
                 clock: Callable[[], float] = time.monotonic, deadlines: Deadlines = Deadlines(),
                 partial_hits: bool = True):  # fmt: skip
        if write not in WRITE_MODES:
            raise InvalidInputError(f"write is {write!r}; allowed are {', '.join(WRITE_MODES)}")
        self.layout, self.tiers, self.write = layout, list(tiers), write
        self.memory = self.tiers[0] if arena else None
        self.record = record if record is not None else Recorder()
        self.index = ChunkIndex()
        self._shared = dict(shared or {})
        self._own = sum(1 << level for level in range(len(self.tiers)) if level not in self._shared)
        self._recompute_seconds, self._clock = recompute_seconds, clock
        self.deadlines = deadlines
        self._awaited: dict[tuple[int, int], float] = {}  # (entry, level) -> when it was ordered, oldest first
        self._looked_at = clock()
        self._away_until: dict[int, float] = {}  # level -> until when its open breaker is believed
        self._starting: set[int] = set()  # levels of which it is not known yet how full they are
        slots = self.memory.capacity_bytes // layout.chunk_nbytes if self.memory is not None else 0
        self._free_slots = list(range(slots - 1, -1, -1))
        self._running: dict[str, _Running] = {}
        self._writing: set[tuple[int, int]] = set()  # (entry, level): the arena's copy is held until it is written
        self._rising: dict[int, tuple[str, int]] = {}  # entry -> (request, attempt) whose load fills its arena slot
        self._served = 0
        self._departed: OrderedDict[bytes, str] = OrderedDict()
        # key of what stands before -> where stored unfull chunks stop -> their entries
        self._tails: dict[bytes, dict[int, set[int]]] = {}
        self._beginnings = Beginnings() if partial_hits else None
        self._outgrown: OrderedDict[bytes, bytes] = OrderedDict()  # tail -> a longer chunk that begins with its tokens
        self.recent_prompts: deque[tuple[bytes, np.ndarray]] = deque(maxlen=_REMEMBERED_PROMPTS)  # (root, tokens)

    # ---------------------------------------------------------------- lookup

    def lookup(self, chain: ChunkChain) -> int:
        """Leading tokens that could be loaded now. Without a shared tier it hashes one chunk past the hit at most."""
        levels = self._own & ~self._away()
        number = self.index.leading(chain.keys(), levels)
        while self._shared and number < len(chain) and (found := self._ask_shared(chain, number)):
            number += found
            number += self.index.leading(chain.keys(number), levels)
        further = self._further(chain, number)
        return further.stop if further is not None else chain.end(number)

    @property
    def asks_others(self) -> bool:
        """Whether a lookup may have to ask a tier that other engines use, and to note the answer."""
        return bool(self._shared)

    def in_memory(self, chain: ChunkChain, stop_token: int) -> int:
        """Leading tokens before `stop_token` that the memory tier holds."""
        stop = 0
        for chunk in self.covering(chain, 0, stop_token):
            if self.memory is None or self.index.find(chunk.key) not in self.memory:
                break
            stop = min(chunk.stop, stop_token)
        return stop

    def _further(self, chain: ChunkChain, number: int) -> "_Further | None":
        """The chunk that the tokens behind the first `number` chunks follow furthest, if it is resident in one of this
        engine's own tiers: a tail to its end, or any chunk as far as it is worth moving."""
        tail = self._tail(chain, number)
        best = _Further(tail, tail.stop) if tail is not None else None
        if self._beginnings is None:
            return best
        usable, least = self._own & ~self._away(), self.layout.chunk_tokens // _LEAST_PART
        found = self._beginnings.along(chain.parent(number), chain.following(number))
        for chunk, tokens in islice(found, _LOOKED_AT):
            if best is not None and chunk.start + tokens <= best.stop:
                break
            entry = self.index.find(chunk.key)
            if entry < 0 or not self.index.resident[entry] & usable:
                continue
            in_arena = self.memory is not None and self.index.resident[entry] & 1
            if tokens == chunk.num_tokens or tokens >= (min(least, _LEAST_IN_MEMORY) if in_arena else least):
                return _Further(chunk, chunk.start + tokens)
        return best

    def _tail(self, chain: ChunkChain, number: int) -> Chunk | None:
        """The longest stored tail whose tokens come next behind the first `number` chunks, or None."""
        stops = self._tails.get(chain.parent(number), {}) if self._tails else {}
        for stop in sorted(stops, reverse=True):
            if stop <= chain.num_tokens and not self._all_known(stops.get(stop, ())):
                tail = chain.part(number, stop)
                entry = self.index.find(tail.key)
                if entry >= 0 and self.index.resident[entry] & self._own & ~self._away():
                    return tail
        return None

    def _all_known(self, tails: Collection[int]) -> bool:
        """Whether the tokens of all these tails can be compared, so that no key has to be hashed to find them."""
        return self._beginnings is not None and all(self.index.keys[e] in self._beginnings for e in list(tails))

    def _away(self) -> int:
        """Levels, as bits, whose breaker was seen open a moment ago: what lies only there is no hit for now."""
        if not self._away_until:
            return 0
        now = self._clock()
        return sum(1 << level for level, until in list(self._away_until.items()) if now < until)

    def covering(self, chain: ChunkChain, first_token: int, stop_token: int) -> list[Chunk]:
        """The chunks that a load of tokens first..stop moves: whole ones and, where one is missing, a stored tail or
        another chunk that begins alike.

        Together they cover all of it, also where a chunk left since the lookup: its load will find it absent.
        """
        chunks: list[Chunk] = []
        number = chain.whole(first_token)
        while number and self.miss_reason(chain[number - 1]):
            number -= 1  # the hit goes on within a stored chunk that reaches further than this prompt's own
        while chain.end(number) < stop_token:
            whole = chain[number] if number < len(chain) else None
            if whole is None or self.miss_reason(whole):
                further = self._further(chain, number)
                if further is not None and further.stop >= stop_token:
                    return [*chunks, further.chunk]
                if whole is None:
                    return [*chunks, chain.part(number, stop_token)]
            chunks.append(whole)
            number += 1
        return chunks

    def _ask_shared(self, chain: ChunkChain, first: int) -> int:
        """How many chunks from `first` on a shared tier holds, as far as one question tells; takes note of them."""
        for level, presence in self._shared.items():
            chunks = [chain[n] for n in range(first, min(first + presence.batch, len(chain)))]
            found = presence.leading([chunk.key for chunk in chunks])
            if not found:
                self._forget_shared(level, chunks)
            if found := self._note_shared(level, chunks[:found]):
                for number in range(first, first + found):
                    self._note_beginning(chain[number], outgrows=True)
                return found
        return 0

    def _forget_shared(self, level: int, chunks: Sequence[Chunk]) -> None:
        """The first of these chunks is no longer in a shared tier; without it the rest is of no use, there or not."""
        for chunk in chunks:
            entry = self.index.find(chunk.key)
            if entry >= 0 and self.index.resident[entry] >> level & 1:
                self._leave(entry, level, "evicted elsewhere")

    def _note_shared(self, level: int, chunks: Sequence[Chunk]) -> int:
        """Index chunks that a shared tier holds; returns how many of them could be."""
        tier, new = self.tiers[level], []
        for number, chunk in enumerate(chunks):
            entry = self.index.add_chunk(chunk)
            self.index.use(entry)
            if not self.index.resident[entry] >> level & 1 and entry not in tier:
                self._make_room(level, tier.chunk_nbytes, [], chunk.key)
                if tier.fits(tier.chunk_nbytes):
                    tier.reserve(entry, tier.chunk_nbytes)
                    self.index.set_resident(entry, level)
                    new.append(entry)
            reached = self.index.resident[entry]
            self.index.unuse(entry)
            if not reached:
                chunks = chunks[:number]
                break
        self._settle(new, [level])
        return len(chunks)

    def miss_reason(self, chunk: Chunk, after_miss: bool = False) -> str:
        """Why a chunk is not a hit, in the words of events and `explain`."""
        entry = self.index.find(chunk.key)
        if entry >= 0 and self.index.resident[entry]:
            if not self.index.resident[entry] & ~self._away():
                return "breaker open"
            return "prefix missing" if after_miss else ""
        if entry >= 0 and self.index.pending[entry]:
            return "still being stored"
        return self._departed.get(chunk.key, "never stored")

    # ---------------------------------------------------------------- requests

    def admit(self, request: str, chain: ChunkChain, *, local_tokens: int = 0, reuse_tokens: int = 0,
              lookup_seconds: float = 0.0) -> None:  # fmt: skip
        """A request starts. It will load `reuse_tokens` after the `local_tokens` that the serving engine has itself.

        `lookup_seconds` is what looking them up took.

        Called again for a request that was preempted, it counts once more only if that one was finished.
        """
        if not self.begin(request, chain):
            return
        self.record("lookup", request=request, tokens=chain.num_tokens - local_tokens, seconds=lookup_seconds)
        self.record("reuse", request=request, tokens=reuse_tokens)
        missed = False
        for number in range(chain.whole(local_tokens), len(chain)):
            chunk = chain[number]
            reason = self.miss_reason(chunk, after_miss=missed)
            if not reason:
                self._record_hit(request, chunk)
                continue
            if not missed:
                chunk = chunk._replace(start=min(chunk.stop, self._record_further(request, chain, number)))
            missed = True
            self.record("miss", request=request, chunk=chunk, reason=reason)
        if not missed:
            self._record_further(request, chain, len(chain))

    def _record_further(self, request: str, chain: ChunkChain, number: int) -> int:
        """Note the last hit, which is no whole chunk; returns where the hits end."""
        further = self._further(chain, number)
        if further is None:
            return chain.end(number)
        self._record_hit(request, further.chunk._replace(stop=further.stop))
        return further.stop

    def _record_hit(self, request: str, chunk: Chunk) -> None:
        level = self.index.level(self.index.find(chunk.key))
        self.record("hit", request=request, chunk=chunk, tier=self.tiers[level].name)

    def begin(self, request: str, chain: ChunkChain) -> bool:
        """Make a request known without counting a lookup; False if it is known."""
        if running := self._running.get(request):
            running.heard = self._clock()
            return False
        self._running[request] = _Running(request, chain, heard=self._clock())
        for tier in self.tiers:
            tier.order.start(self._served + 1, self._clock())  # what makes room for it is as old as it is now
        return True

    def plan_loads(self, request: str, first_token: int, stop_token: int, blocks: Sequence[int]) -> list[Order]:
        """Orders that fill the blocks of tokens first..stop.

        Every chunk is held where it lies before the first one is promoted, so that none makes room for another. A
        chunk that left since the lookup is ordered all the same: the data plane finds it absent and says so.

        Args:
            request: An admitted request whose lookup covered these tokens.
            first_token: Multiple of the block size; what lies before it is there already.
            stop_token: Any token: the block that it lies in is filled beyond it with what does not belong there.
            blocks: The request's block table, from token 0.
        """
        running, layout = self._running[request], self.layout
        running.heard = self._clock()
        first, stop = first_token // layout.block_size, layout.blocks_of(stop_token)
        orders: list[Order] = []
        chunks = self.covering(running.chain, first_token, stop_token)
        entries = [self._use(running, c) if running.chain.goes_through(c) else self._borrow(running, c) for c in chunks]
        levels = [self._hold_fastest(running, entry) for entry in entries]
        for chunk, entry, level in zip(chunks, entries, levels, strict=True):
            wanted = tuple(blocks[b] if first <= b < stop else -1 for b in self._blocks(chunk))
            if level >= 0 and self.tiers[level] is self.memory:
                slot = self.index.slots[entry]
            elif level >= 0 and chunk.key in running.used:
                slot = self._promote(running, entry, orders)
            else:
                slot = STAGING
            orders.append(Load(request, running.attempt, chunk, wanted, max(0, level), slot))
        return orders

    def _blocks(self, chunk: Chunk) -> range:
        """Where a chunk's blocks stand in a request's block table."""
        return range(chunk.start // self.layout.block_size, self.layout.blocks_of(chunk.stop))

    def plan_stores(self, request: str, stop_token: int, blocks: Sequence[int], *, tail: bool = False) -> list[Order]:
        """Orders that store each whole chunk before `stop_token` that is neither resident nor on its way.

        A chunk without room is dropped, and with it those behind it: without their prefix they are of no use.

        Args:
            request: An admitted request.
            stop_token: Tokens whose KV will be there when the orders are carried out.
            blocks: The request's block table, from token 0.
            tail: Store what stands between the last whole chunk and `stop_token`, too. Such a chunk stays within this
                engine's own tiers: others could not guess where it stops.
        """
        orders: list[Order] = []
        running = self._running.get(request)
        if running is None:  # silent for so long that it was taken for over
            return orders
        running.heard, chain = self._clock(), running.chain
        self._remove_outgrown(orders)
        for number in range(running.planned, chain.whole(stop_token)):
            running.planned = number + 1
            self._plan_store(running, chain[number], blocks, orders)
            self._note_beginning(chain[number], outgrows=True)
        whole = chain.whole(stop_token)
        if tail and chain.end(whole) < stop_token:
            part = chain.part(whole, stop_token)
            self._plan_store(running, part, blocks, orders, tail=True)
            self._note_beginning(part, outgrows=True)
        return orders

    def _note_beginning(self, chunk: Chunk, *, outgrows: bool = False) -> None:
        """Other prompts may reuse the beginning of a chunk that is stored, or on its way, if it is text alone.

        Args:
            chunk: With its tokens.
            outgrows: Tails that it contains have served their time.
        """
        entry = self.index.find(chunk.key)
        if self._beginnings is None or entry < 0 or not self.index.anywhere(entry):
            return
        if self._beginnings.touch(chunk.key) or not chunk.is_text_alone(self.layout.chunk_tokens):
            return
        if outgrows:
            for other, tokens in islice(self._beginnings.along(chunk.parent, chunk.tokens), _LOOKED_AT):
                if tokens == other.num_tokens:
                    self._outgrown[other.key] = chunk.key
        self._beginnings.add(chunk)

    def _note_stored_beginning(self, stored: StoredChunk) -> None:
        """The same for what another process stored, or an earlier start, where the tier tells its tokens."""
        if stored.tokens:
            self._note_beginning(Chunk(stored.key, stored.parent, stored.start, stored.stop, stored.tokens))

    def _remove_outgrown(self, orders: list[Order]) -> None:
        """Remove each tail that lies in a longer chunk as well, once that is resident and nobody uses the tail.

        A few are looked at each time: those of running requests, which may be many, wait for their end.
        """
        for _ in range(min(_LOOKED_AT, len(self._outgrown))):
            tail, longer = self._outgrown.popitem(last=False)
            entry, above = self.index.find(tail), self.index.find(longer)
            if entry < 0 or above < 0 or self.index.children[entry]:
                continue
            if self.index.in_use(entry) or self.index.pending[entry] or not self.index.resident[above] & self._own:
                self._outgrown[tail] = longer
                continue
            chunk = self._chunk(entry)
            for level in [level for level, tier in enumerate(self.tiers) if entry in tier]:
                self.record("remove", tier=self.tiers[level].name, chunk=chunk, reason="within a longer chunk")
                if self.tiers[level] is not self.memory and level not in self._shared:
                    orders.append(Erase(tail, level))
                self._leave(entry, level, "within a longer chunk")

    def _plan_store(self, running: _Running, chunk: Chunk, blocks: Sequence[int], orders: list[Order],
                    tail: bool = False) -> None:  # fmt: skip
        known = self.index.find(chunk.key)
        if known >= 0 and self.index.anywhere(known):
            if chunk.key not in running.used:
                self._hold_resident(running, self._use(running, chunk))
                self.record("dedup", request=running.name, chunk=chunk)
                self._write_down(known, chunk, orders, own_only=tail)
            return
        if chunk.start and not self._reachable(chunk.parent):
            self._drop(running.name, chunk, "prefix not stored")
            return
        entry = self._use(running, chunk)
        slot, write_to = self._place(entry, orders, own_only=tail)
        if slot == STAGING and not write_to:
            self._drop(running.name, chunk, "starting up" if self._starting else "no room")
            return
        if tail:
            self._note_tail(chunk.parent, chunk.stop, entry)
        own = tuple(blocks[b] for b in self._blocks(chunk))
        orders.append(Store(running.name, running.attempt, chunk, own, slot, write_to))

    def _write_down(self, entry: int, chunk: Chunk, orders: list[Order], own_only: bool) -> None:
        """A chunk that the arena alone has, since a slower tier once refused it, gets another chance where room is."""
        if self.write != "through" or self.memory is None or not self.index.resident[entry] & 1:
            return
        for level, tier in enumerate(self.tiers[1:], 1):
            known = (self.index.resident[entry] | self.index.pending[entry]) >> level & 1
            closed = (own_only and level in self._shared) or level in self._starting
            if not known and not closed and tier.fits(tier.chunk_nbytes):
                self._reserve(entry, level)
                self._hold_while_written(entry, level)
                orders.append(Write(chunk, self.index.slots[entry], level, stays=True))

    def _hold_while_written(self, entry: int, level: int) -> None:
        self.memory.hold(entry)
        self._writing.add((entry, level))

    def finish(self, request: str) -> None:
        """The request is over, in whatever way: its chunks enter each tier's order, the last one as the oldest."""
        running = self._running.pop(request, None)
        if running is None:
            return
        self.recent_prompts.append((running.chain.root, running.chain.tokens()))
        used = sorted(running.used.values(), key=self.index.stops.__getitem__)
        self._settle(used)  # while held: their order is by use alone
        for tier, entry in running.holds:
            tier.release(entry)
        for entry in [*used, *running.borrowed]:
            self.index.unuse(entry)
        self._settle_late(dict.fromkeys(running.borrowed))

    def hold_prefix(self, chain: ChunkChain, tokens: int) -> list[tuple[TierIndex, int]]:
        """Keep the first tokens of a chain in every tier that has them, until `release_prefix`."""
        holds = []
        for chunk in self.covering(chain, 0, tokens):
            entry = self.index.add_chunk(chunk)
            for tier in self.tiers:
                if entry in tier:
                    tier.hold(entry)
                    self.index.use(entry)
                    holds.append((tier, entry))
        return holds

    def release_prefix(self, holds: Collection[tuple[TierIndex, int]]) -> None:
        """Give back what `hold_prefix` held."""
        for tier, entry in holds:
            tier.release(entry)
            self.index.unuse(entry)
        self._settle_late(dict.fromkeys(entry for _, entry in holds))

    def _settle_late(self, entries: Collection[int]) -> None:
        """Chunks that were confirmed while held, with no request left to settle them."""
        for level, tier in enumerate(self.tiers):
            if late := [e for e in entries if e in tier and e not in tier.order and not self.index.in_use(e)]:
                self._settle(late, [level])

    # ---------------------------------------------------------------- what the data plane says

    def apply(self, report: Iterable[Done]) -> None:
        """Take note of what was done: confirmed chunks become resident, failed ones are taken back.

        An answer counts however long nobody came to fetch it; only then is it seen what is still without one.
        """
        late: dict[tuple[str, int], list[int]] = {}
        for done in report:
            entry = self.index.find(done.key)
            if entry < 0:
                continue
            confirmed = {"store": self._stored, "write": self._written, "load": self._loaded}[done.kind](entry, done)
            if confirmed >= 0 and not self.index.in_use(entry):
                late.setdefault((done.request, confirmed), []).append(entry)
        for (_, level), entries in late.items():  # their request was over before they were confirmed
            self._settle(entries, [level])
        self.expire()

    def _stored(self, entry: int, done: Done) -> int:
        """Note a store into the arena; returns the level that now holds the chunk, or -1. So do the next two."""
        chunk, tier = self._chunk(entry), self.tiers[done.level]
        self.record("store", tier=tier.name, request=done.request, chunk=chunk, nbytes=done.nbytes,
                    seconds=done.seconds, reason=done.reason)  # fmt: skip
        if done.reason:
            self._store_failed(entry, done)
            return -1
        if (entry, 0) not in self._awaited:
            return -1  # given up meanwhile: the slot may be another chunk's
        return self._confirm(entry, done.level)

    def _written(self, entry: int, done: Done) -> int:
        chunk, tier = self._chunk(entry), self.tiers[done.level]
        reason = "" if done.reason == "dedup" else done.reason
        self.record("store", tier=tier.name, request=done.request, chunk=chunk, nbytes=done.nbytes,
                    seconds=done.seconds, reason=reason)  # fmt: skip
        self._let_go_of_written(entry, done.level)
        if reason:
            self._store_failed(entry, done)
            return -1
        if entry not in tier:  # given up meanwhile, and there after all
            nbytes = done.nbytes or tier.chunk_nbytes
            if not tier.fits(nbytes):
                return -1
            tier.reserve(entry, nbytes)
        tier.shrink(entry, done.nbytes)
        return self._confirm(entry, done.level)

    def _loaded(self, entry: int, done: Done) -> int:
        chunk, tier = self._chunk(entry), self.tiers[done.level]
        self.record("load", tier=tier.name, request=done.request, chunk=chunk, nbytes=done.nbytes,
                    seconds=done.seconds, reason=done.reason)  # fmt: skip
        rising = self._rising.get(entry) == (done.request, done.attempt)
        if rising:
            del self._rising[entry]
        if done.reason in ("breaker open", "timeout"):
            self._away_until[done.level] = self._clock() + _AWAY_SECONDS
        if done.reason:
            if running := self._running.get(done.request):
                running.attempt, running.planned = max(running.attempt, done.attempt + 1), 0
            if rising:
                self._take_back(entry, 0)
            if done.reason in _BAD_BYTES and done.level in self._shared:
                self._shared[done.level].forget(done.key)
            if done.reason in _BAD_BYTES and self.index.resident[entry] >> done.level & 1:
                self.record("remove", tier=tier.name, chunk=chunk, reason=done.reason)
                self._leave(entry, done.level, done.reason)
            return -1
        if not rising:
            return -1
        self.record("promote", tier=self.tiers[0].name, chunk=chunk, nbytes=done.nbytes)
        return self._confirm(entry, 0)

    def _let_go_of_written(self, entry: int, level: int) -> None:
        if (entry, level) in self._writing:
            self._writing.remove((entry, level))
            self.memory.release(entry)

    def expire(self) -> None:
        """Take back what has gone unanswered for too long. Looked at now and then, whenever a report is applied."""
        now = self._clock()
        if now - self._looked_at < min(1.0, self.deadlines.order / 4, self.deadlines.request / 4):
            return
        self._looked_at = now
        while self._awaited:
            (entry, level), ordered = next(iter(self._awaited.items()))
            if now - ordered < self.deadlines.order:
                break
            self._give_up(entry, level)
        for running in [r for r in self._running.values() if now - r.heard >= self.deadlines.request]:
            self.record("drop", request=running.name, reason="deadline")
            self.finish(running.name)

    def _give_up(self, entry: int, level: int) -> None:
        """An order that nobody answers: its room is free again. An answer that comes after all changes nothing here."""
        rose = self._rising.pop(entry, None) if level == 0 else None
        kind, tier = "load" if rose is not None else "store", self.tiers[level].name
        self.record(kind, tier=tier, chunk=self._chunk(entry), reason="deadline")
        self._let_go_of_written(entry, level)
        self._take_back(entry, level)

    # ---------------------------------------------------------------- what a tier holds from before, or from others

    def begin_adoption(self, level: int) -> None:
        """From now on nothing new is stored in a tier, until `adopting` has come to its end and it is known how full
        the tier is."""
        self._starting.add(level)

    def end_adoption(self, level: int) -> None:
        self._starting.discard(level)

    def adopting(self, level: int, found: Iterable[StoredChunk]) -> Iterator[list[Order]]:
        """Take over what a tier held before this start, given oldest use first, in pieces between which other calls may
        come in. Yields orders to erase what has no room: what was used last stays, with all that stands before it.
        """
        tier, orders, adopted = self.tiers[level], [], []
        latest_first = _latest_first(list(found))
        for number, stored in enumerate(latest_first, 1):
            orphan = stored.start and not self._reachable(stored.parent) and stored.parent in self._departed
            if orphan or not tier.fits(stored.nbytes):
                orders.append(Erase(stored.key, level))
                self._remember_departure(stored.key, "evicted")
            elif (entry := self._take_over(level, stored)) >= 0:
                adopted.append(entry)
            if number % _ADOPTED_AT_ONCE == 0:
                yield orders
                orders = []
        self._settle(adopted, [level])
        self.end_adoption(level)
        yield orders
        for number, stored in enumerate(reversed(latest_first), 1):
            self._note_stored_beginning(stored)
            if number % _ADOPTED_AT_ONCE == 0:
                yield []

    def _take_over(self, level: int, stored: StoredChunk) -> int:
        """Count a record that lies in a tier; -1 if it is counted already."""
        entry = self.index.add(stored.key, stored.parent, stored.start, stored.stop)
        if entry in self.tiers[level]:
            return -1
        self.tiers[level].reserve(entry, stored.nbytes)
        self.index.set_resident(entry, level)
        if stored.stop - stored.start < self.layout.chunk_tokens:
            self._note_tail(stored.parent, stored.stop, entry)
        return entry

    def keys_at(self, level: int) -> list[bytes]:
        """Keys of the chunks that are resident in a tier. May be called from any thread."""
        index = self.index
        entries = [entry for entry in self.tiers[level].entries() if index.resident[entry] >> level & 1]
        return [key for entry in entries if (key := index.keys[entry]) is not None]

    def note_changes(self, level: int, changes: Changes) -> list[Order]:
        """Other processes brought chunks to a tier and took some away. What they brought counts, and makes others go.

        Returns orders to erase what has to go, or has no room at all.
        """
        tier, orders, new = self.tiers[level], [], []
        for key in changes.gone:
            entry = self.index.find(key)
            if entry >= 0 and self.index.resident[entry] >> level & 1:
                self.record("remove", tier=tier.name, chunk=self._chunk(entry), reason="removed elsewhere")
                self._leave(entry, level, "removed elsewhere")
        for stored in changes.arrived:
            if self.index.find(stored.key) in tier:
                continue
            self._make_room(level, stored.nbytes, orders, stored.key)
            if not tier.fits(stored.nbytes):
                orders.append(Erase(stored.key, level))
            elif (entry := self._take_over(level, stored)) >= 0:
                new.append(entry)
                self._note_stored_beginning(stored)
        self._settle(new, [level])
        return orders

    # ---------------------------------------------------------------- clearing

    def clear(self, roots: Collection[bytes] | None = None) -> list[Order]:
        """Forget every chunk that no running request holds; returns the orders that erase their bytes.

        Args:
            roots: Only chunks of prompts that begin at one of these roots.
        """
        orders: list[Order] = []
        chosen = None if roots is None else self.index.under(roots)
        kept = [] if roots is None else [prompt for prompt in self.recent_prompts if prompt[0] not in roots]
        self.recent_prompts = deque(kept, maxlen=_REMEMBERED_PROMPTS)
        for presence in self._shared.values():
            presence.clear()
        for level, tier in enumerate(self.tiers):
            entries = [entry for entry in tier.entries() if chosen is None or entry in chosen]
            for entry in sorted(entries, key=lambda e: -self.index.depths[e]):
                if self.index.pending[entry] or self.index.in_use(entry):
                    continue  # a transfer reads or fills it
                chunk = self._chunk(entry)
                self.record("remove", tier=tier.name, chunk=chunk, reason="cleared")
                if tier is not self.memory:
                    orders.append(Erase(chunk.key, level))
                self._leave(entry, level, "cleared")
        return orders

    # ---------------------------------------------------------------- room and residence

    def _place(self, entry: int, orders: list[Order], own_only: bool = False) -> tuple[int, tuple[int, ...]]:
        """Reserve room for a new chunk: (arena slot or STAGING, slower levels to write to)."""
        slot = self._arena_slot(entry, orders)
        levels = range(1 if self.memory is not None else 0, len(self.tiers))
        if self.write == "back":  # the fastest tier with room takes it; the others get it when that one evicts it
            levels = levels[: 0 if slot != STAGING else 1]
        if own_only:
            levels = [level for level in levels if level not in self._shared]
        write_to = tuple(level for level in levels if self._reserve_below(entry, level, orders))
        if slot != STAGING:
            for level in write_to:
                self._hold_while_written(entry, level)
        return slot, write_to

    def _arena_slot(self, entry: int, orders: list[Order]) -> int:
        if self.memory is None:
            return STAGING
        self._make_room(0, self.layout.chunk_nbytes, orders, self.index.keys[entry])
        if not self.memory.fits(self.layout.chunk_nbytes):
            return STAGING
        self._reserve(entry, 0)
        self.index.slots[entry] = self._free_slots.pop()
        return self.index.slots[entry]

    def _reserve_below(self, entry: int, level: int, orders: list[Order]) -> bool:
        if level in self._starting:
            return False
        nbytes = self.tiers[level].chunk_nbytes
        self._make_room(level, nbytes, orders, self.index.keys[entry])
        if not self.tiers[level].fits(nbytes):
            return False
        self._reserve(entry, level)
        return True

    def _reserve(self, entry: int, level: int) -> None:
        """Room for a chunk that an order will bring; it counts as pending until the answer, or the deadline."""
        self.tiers[level].reserve(entry, self.tiers[level].chunk_nbytes)
        self.index.set_pending(entry, level)
        self._awaited[entry, level] = self._clock()

    def _make_room(self, level: int, nbytes: int, orders: list[Order], incoming: bytes) -> None:
        tier = self.tiers[level]
        goes_down = self.write == "back" and level + 1 < len(self.tiers) and tier is self.memory
        demoted: set[int] = set()

        def keep(entry: int) -> bool:
            """Not the last copy of a chunk that others continue: a child never outlives its parent."""
            last = goes_down and self.index.is_last_copy(entry, level) and self._is_for(entry, level + 1)
            if last and self._reserve_below(entry, level + 1, orders):
                demoted.add(entry)
            return self.index.children[entry] > 0 and self.index.is_last_copy(entry, level)

        for victim in tier.room(nbytes, keep, incoming):
            chunk = self._chunk(victim)
            self.record("evict", tier=tier.name, chunk=chunk, nbytes=tier.chunk_nbytes, reason="capacity")
            self.index.use(victim)
            if victim in demoted:
                orders.append(Write(chunk, self.index.slots[victim], level + 1))
                self.record("demote", tier=self.tiers[level + 1].name, chunk=chunk)
            if tier is not self.memory and level not in self._shared:
                orders.append(Erase(chunk.key, level))
            self._vacate(victim, level, "evicted")
            if not self.index.anywhere(victim):
                self.record("drop", tier=tier.name, chunk=chunk, reason="evicted")
            self.index.unuse(victim)

    def _confirm(self, entry: int, level: int) -> int:
        self.index.set_resident(entry, level)
        self._awaited.pop((entry, level), None)
        self._departed.pop(self.index.keys[entry], None)
        if level in self._shared:
            self._shared[level].note(self.index.keys[entry])
        return level

    def _drop(self, request: str, chunk: Chunk, reason: str) -> None:
        """A chunk that is not stored, for want of room for it or for what stands before it."""
        self.record("drop", request=request, chunk=chunk, reason=reason)
        self._remember_departure(chunk.key, reason)

    def _store_failed(self, entry: int, done: Done) -> None:
        self._take_back(entry, done.level)
        if done.reason == "tainted" and (running := self._running.get(done.request)):
            running.attempt, running.planned = max(running.attempt, done.attempt + 1), 0

    def _take_back(self, entry: int, level: int) -> None:
        """A store that did not happen: the room is free again."""
        if entry in self.tiers[level]:
            self._leave(entry, level, "store failed")

    def _leave(self, entry: int, level: int, reason: str) -> None:
        if entry in self.tiers[level]:
            self.tiers[level].remove(entry)
            self._vacate(entry, level, reason)

    def _vacate(self, entry: int, level: int, reason: str) -> None:
        """Bookkeeping of a chunk that is no longer in a tier."""
        self._awaited.pop((entry, level), None)
        if self.tiers[level] is self.memory:
            self._free_slots.append(self.index.slots[entry])
            self.index.slots[entry] = -1
        if self.index.is_last_copy(entry, level):
            self._remember_departure(self.index.keys[entry], reason)
            self._forget_tail(entry)
            if self._beginnings is not None:
                self._beginnings.discard(self.index.keys[entry])
        self.index.clear(entry, level)

    def _note_tail(self, parent: bytes, stop: int, entry: int) -> None:
        self._tails.setdefault(parent, {}).setdefault(stop, set()).add(entry)

    def _forget_tail(self, entry: int) -> None:
        if not self._tails:
            return
        parent, stop = self.index.parent_key(entry), self.index.stops[entry]
        stops = self._tails.get(parent, {})
        entries = stops.get(stop, set())
        entries.discard(entry)
        if not entries:
            stops.pop(stop, None)
        if not stops:
            self._tails.pop(parent, None)

    def _is_for(self, entry: int, level: int) -> bool:
        """Whether a chunk may go down to a tier: a tail that nothing continues stays within this engine's own."""
        tails = self._tails.get(self.index.parent_key(entry), {}).get(self.index.stops[entry], ())
        return level not in self._shared or entry not in tails or self.index.children[entry] > 0

    def _remember_departure(self, key: bytes, reason: str) -> None:
        self._departed[key] = reason
        while len(self._departed) > _REMEMBERED_DEPARTURES:
            self._departed.popitem(last=False)

    def _settle(self, entries: Sequence[int], levels: Iterable[int] | None = None) -> None:
        """The chunks of one request, prefix first, enter each tier's order or are touched there."""
        self._served += 1
        for level in range(len(self.tiers)) if levels is None else levels:
            tier = self.tiers[level]
            tier.begin(self._served, self._clock())
            for entry in entries:
                if self.index.resident[entry] >> level & 1 and entry in tier:
                    tier.settle(entry, **self._about(entry))
            tier.end()

    def _about(self, entry: int) -> dict[str, object]:
        index = self.index
        return {
            "key": index.keys[entry],
            "parent": index.parents[entry],
            "depth": index.depths[entry],
            "tokens": index.stops[entry] - index.starts[entry],
            "recompute_seconds": self._recompute_seconds(index.starts[entry], index.stops[entry]),
        }

    # ---------------------------------------------------------------- holds

    def _use(self, running: _Running, chunk: Chunk) -> int:
        if chunk.key not in running.used:
            entry = self.index.add_chunk(chunk)
            self.index.use(entry)
            running.used[chunk.key] = entry
        return running.used[chunk.key]

    def _borrow(self, running: _Running, chunk: Chunk) -> int:
        """A chunk of which the request takes the beginning. It keeps its place in the eviction order: the request
        stores a chunk of its own that begins alike."""
        entry = self.index.add_chunk(chunk)
        self.index.use(entry)
        running.borrowed.append(entry)
        return entry

    def _hold(self, running: _Running, level: int, entry: int) -> None:
        self.tiers[level].hold(entry)
        running.holds.append((self.tiers[level], entry))

    def _hold_fastest(self, running: _Running, entry: int) -> int:
        """Hold a chunk in the fastest tier that has it; returns the tier's level, or -1."""
        level = self.index.level(entry)
        if level >= 0:
            self._hold(running, level, entry)
        return level

    def _hold_resident(self, running: _Running, entry: int) -> None:
        for level, tier in enumerate(self.tiers):
            if entry in tier:
                self._hold(running, level, entry)

    def _promote(self, running: _Running, entry: int, orders: list[Order]) -> int:
        if self.memory is None or entry in self.memory:
            return STAGING
        slot = self._arena_slot(entry, orders)
        if slot != STAGING:
            self._rising[entry] = (running.name, running.attempt)
        return slot

    def _reachable(self, parent: bytes) -> bool:
        entry = self.index.find(parent)
        return entry >= 0 and bool(self.index.resident[entry] | self.index.pending[entry])

    def _chunk(self, entry: int) -> Chunk:
        """Key and place of an entry, for events and erasures; without its tokens."""
        index = self.index
        return Chunk(index.keys[entry], index.parent_key(entry), index.starts[entry], index.stops[entry], b"")


def _latest_first(found: Sequence[StoredChunk]) -> list[StoredChunk]:
    """Sorted from the latest use to the oldest, given the reverse; a use of a chunk is one of all before it."""
    age = {stored.key: number for number, stored in enumerate(found)}
    for stored in sorted(found, key=lambda s: -s.start):
        if stored.parent in age:
            age[stored.parent] = max(age[stored.parent], age[stored.key])
    return sorted(found, key=lambda s: (-age[s.key], s.start))

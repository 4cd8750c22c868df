"""One policy ordering the chunks of one tier of the live engine.

    begin(request) -> hit(c)... -> victim() -> insert(c)... -> begin(next request)

The same template runs in replay (experiments.replay), so both name the same victims in the same order. Hits and
inserts are kept as a batch and told to the policy when the next request begins, in touch order; a victim is asked for
with what the policy knew when the request began. Thread safety is the caller's, as for the tier itself.
"""

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, Literal

import numpy as np

from workbench.errors import InvalidInputError
from workbench.policies.base import CHUNK_FIELDS, PolicyError
from workbench.policies.compiled import State, build, make_state
from workbench.policies.names import resolve_policy

__all__ = ["LivePolicy", "TouchOrder"]

TouchOrder = Literal["tail_first", "head_first"]
BROKEN = -2
NEW = 3  # in the tier, the policy has not heard of it; of _order.py
NEXT, TAKE, SET_ASIDE, PUT_BACK, WITHDRAW, UNPIN = range(6)  # of act() in _order.py
FIRST_CHUNKS = 256  # records allocated at first; they double on demand


class LivePolicy:
    """The order of one tier's chunks.

    Args:
        policy: A policy class, instance or name; see `resolve_policy`.
        capacity_chunks: About how many chunks the tier holds. The caller decides when to evict; policies with targets
            (ARC, S3-FIFO) are tuned to this number.
        touch_order: In which order the chunks of one request are told to the policy. "tail_first" makes the deepest
            chunk the oldest, as vLLM does; "head_first" is the order in which they were given.

    Raises:
        InvalidInputError: The policy needs to know the future, or a setting is out of range.
    """

    def __init__(self, policy: Any, *, capacity_chunks: int, touch_order: TouchOrder = "tail_first"):
        if touch_order not in ("tail_first", "head_first"):
            raise InvalidInputError(f"touch_order must be 'tail_first' or 'head_first', got {touch_order!r}")
        if capacity_chunks < 1:
            raise InvalidInputError(f"capacity_chunks must be at least 1, got {capacity_chunks}")
        self.policy = resolve_policy(policy)
        self.capacity_chunks, self.touch_order = capacity_chunks, touch_order
        built = build(self.policy, entry_points=_compile_live)
        if "admit" in built.form.methods or (built.compiled and "next_use" in built.mentions):
            raise InvalidInputError(f"policy {built.form.name} uses the future or admission, which only a replay has")
        self._state = make_state(
            built, self.policy, chunks=FIRST_CHUNKS, capacity=capacity_chunks, resident=FIRST_CHUNKS
        )
        self._about = frozenset(CHUNK_FIELDS) & frozenset(built.chunk_type.names or ())
        self._remembers = "is_ghost" in built.form.methods
        self._slot: dict[int, int] = {}  # the caller's index -> ours, which rests while the policy refers to it
        self._index: dict[int, int] = {}  # ours -> the caller's, for what is in the tier
        self._free = list(range(FIRST_CHUNKS - 1, -1, -1))
        self._resting: set[int] = set()  # removed, but the policy still orders them
        self._keys: dict[int, Hashable] = {}
        self._ghosts: dict[Hashable, int] = {}  # key -> slot of an evicted chunk that the policy may remember
        self._sweep_ghosts_at = FIRST_CHUNKS
        self._pins: dict[int, int] = {}  # slot -> pins, for pinned chunks only
        self._batch: list[int] = []  # hits and inserts that the policy has not heard of
        self.pins_total = 0

    def __repr__(self) -> str:
        return f"LivePolicy({self.policy!r}, capacity_chunks={self.capacity_chunks}, touch_order={self.touch_order!r})"

    def __contains__(self, c: int) -> bool:
        return self._slot.get(c) in self._index

    def __len__(self) -> int:
        return len(self._index)

    def begin(self, request: int, now: float) -> None:
        """A request starts: the policy hears of the last one's hits and inserts.

        Args:
            request: Sequence number, for order.
            now: Seconds on a clock that never goes back, for durations.
        """
        self.settle()
        self.start(request, now)

    def start(self, request: int, now: float) -> None:
        """Set the request number and the time alone; what is untold stays so. For engines with requests in parallel."""
        self._state.put_scalar("request", request)
        self._state.put_scalar("now", now)

    def settle(self) -> None:
        """Tell the policy now what begin() of the next request would tell it."""
        self._tell(self._batch)
        self._batch = []

    def tell(self, chunks: Sequence[int], *, inserted: Collection[int] = ()) -> None:
        """Tell the policy now of one finished request's chunks, whatever other requests have open.

        Args:
            chunks: In prefix order. Those that the policy has not heard of count as inserts, the others as hits.
            inserted: Of these, the ones that the request itself inserted: no hits, even if they were told already.
        """
        slots = [self._slot[c] for c in chunks if self._is_new(c) or c not in inserted]
        told = set(slots)
        self._batch = [slot for slot in self._batch if slot not in told]
        self._tell(slots)

    def _is_new(self, c: int) -> bool:
        return self._state.get(self._slot[c], "_state") == NEW

    def _tell(self, slots: list[int]) -> None:
        state = self._state
        touched = np.array(slots, np.int64) if state.built.compiled else slots
        state.module.settle(state.s, state.r, state.t, touched, 0, len(touched), self.touch_order == "tail_first")

    def insert(self, c: int, *, parent: int = -1, key: Hashable = None, **about: float) -> None:
        """Chunk c is now in the tier.

        Args:
            c: A small index that is not in use.
            parent: Index of the chunk right above it, -1 if there is none in this tier.
            key: What the chunk is, the same if it is stored again later. Policies that remember evicted chunks (ARC,
                S3-FIFO, 2Q, LIRS) need it to know a returning one.
            about: depth, nbytes, tokens, recompute_seconds, load_seconds, tenant; 0 where not given.
        """
        assert c not in self._slot, f"index {c} is in use"
        slot = self._ghosts.pop(key, -1) if key is not None else -1
        if slot < 0:
            slot = self._take_slot()
        self._slot[c], self._index[slot], self._keys[slot] = slot, c, key
        state = self._state
        above = self._slot.get(parent, -1)
        state.put(slot, "parent", above if above in self._index else -1)
        for name in self._about & about.keys():
            state.put(slot, name, about[name])
        if "key" in self._about:
            state.put(slot, "key", _key_bits(key, c))
        state.module.enter(state.s, state.r, state.t, slot)
        self._batch.append(slot)

    def hit(self, c: int) -> None:
        """Chunk c was used."""
        self._batch.append(self._slot[c])

    def pin(self, c: int) -> None:
        """Keep chunk c from eviction until as many unpins."""
        slot = self._slot[c]
        count = self._pins.get(slot, 0)
        self._pins[slot] = count + 1
        self.pins_total += 1
        if count == 0:
            self._state.put(slot, "_pins", 1)

    def unpin(self, c: int) -> None:
        """Take one pin of chunk c back."""
        slot = self._slot[c]
        count = self._pins.get(slot, 0)
        assert count > 0, f"chunk {c} is not pinned"
        self.pins_total -= 1
        if count > 1:
            self._pins[slot] = count - 1
            return
        del self._pins[slot]
        self._act(UNPIN, slot)
        if slot not in self._index:  # it was removed while pinned
            del self._slot[c]
            self._release(slot)

    def victim(self, keep: Callable[[int], bool] | None = None, *, incoming: Hashable = None) -> int:
        """Evict the next chunk that may go.

        Args:
            keep: Further chunks to spare, asked by index.
            incoming: Key of the chunk that needs the room, for policies that look at it (ARC).

        Returns:
            Its index, which is free again; -1 if every chunk is pinned, kept or has resident children.

        Raises:
            PolicyError: evict() named a chunk that is not in the policy's order.
        """
        slot = self._next(keep, incoming)
        if slot < 0 and self._batch:
            self.settle()  # what is new in this request may be all there is
            slot = self._next(keep, incoming)
        if slot < 0:
            return -1
        c = self._index.pop(slot)
        del self._slot[c]
        key, parent = self._keys.pop(slot), self._state.get(slot, "parent")
        if self._batch and slot in self._batch:
            self._batch = [other for other in self._batch if other != slot]
        if self._remembers:
            self._ghosts[object() if key is None else key] = slot
            self._sweep_ghosts()
        else:
            self._release(slot)
        self._release(parent)
        return c

    def remove(self, c: int) -> None:
        """Chunk c left the tier on request. If it is pinned, index c is free only after its last unpin."""
        slot = self._slot[c]
        del self._index[slot], self._keys[slot]
        state = self._state
        if not self._act(WITHDRAW, slot):
            self._resting.add(slot)
        self._batch = [other for other in self._batch if other != slot]
        if slot not in self._pins:
            del self._slot[c]
        parent = state.get(slot, "parent")
        self._release(slot)
        self._release(parent)

    @property
    def pinned(self) -> int:
        """Chunks with at least one pin."""
        return len(self._pins)

    def children(self, c: int) -> int:
        """Resident chunks right below chunk c."""
        return int(self._state.get(self._slot[c], "children"))

    def pins(self, c: int) -> int:
        """Pins on chunk c."""
        return self._pins.get(self._slot[c], 0)

    def _next(self, keep: Callable[[int], bool] | None, incoming: Hashable) -> int:
        spared: list[int] = []
        wanted = self._ghosts.get(incoming, -1)
        while (slot := self._act(NEXT, wanted)) >= 0 and keep is not None and keep(self._index[slot]):
            self._act(SET_ASIDE, slot)
            spared.append(slot)
        self._collect_buried()
        if slot == BROKEN:
            raise PolicyError(
                f"evict() of {self.policy!r} returned {self._state.get_scalar('_broken')}, which is not a chunk in its "
                f"order; it holds {len(self)} of about {self.capacity_chunks} chunks"
            )
        if slot >= 0:
            self._act(TAKE, slot)
        for other in reversed(spared):
            self._act(PUT_BACK, other)
        return int(slot)

    def _act(self, what: int, slot: int) -> int:
        state = self._state
        return state.module.act(state.s, state.r, state.t, what, slot)

    def _take_slot(self) -> int:
        if not self._free:
            have = len(self._state.s)
            self._state.grow(2 * have)
            self._free = list(range(2 * have - 1, have - 1, -1))
        return self._free.pop()

    def _release(self, slot: int) -> None:
        """Use a slot again, unless something still refers to it."""
        if slot < 0 or slot in self._index or slot in self._pins or slot in self._resting:
            return
        state = self._state
        if state.get(slot, "children") > 0:
            return
        if self._remembers and state.module.is_ghost(state.s, state.r, state.t, slot):
            if slot not in self._ghosts.values():
                self._ghosts[object()] = slot
            return
        state.clear(slot)
        self._free.append(slot)

    def _sweep_ghosts(self) -> None:
        if len(self._ghosts) < self._sweep_ghosts_at:
            return
        state = self._state
        for key, slot in list(self._ghosts.items()):
            if not state.module.is_ghost(state.s, state.r, state.t, slot):
                del self._ghosts[key]
                self._release(slot)
        self._sweep_ghosts_at = 2 * len(self._ghosts) + FIRST_CHUNKS

    def _collect_buried(self) -> None:
        state = self._state
        while (slot := state.get_scalar("_buried")) >= 0:
            state.put_scalar("_buried", state.get(slot, "_next_buried"))
            self._resting.discard(int(slot))
            self._release(int(slot))


def _key_bits(key: Hashable, c: int) -> int:
    if isinstance(key, int):
        return key
    return int.from_bytes(key[:8], "little", signed=True) if isinstance(key, bytes) else c


def _compile_live(state: State) -> None:
    """Compile what LivePolicy calls."""
    from numba import typeof, types

    arrays = tuple(typeof(part) for part in (state.s, state.r, state.t))
    chunk = types.int64
    for name in ("enter", "is_ghost"):
        getattr(state.module, name).compile((*arrays, chunk))
    state.module.act.compile((*arrays, chunk, chunk))
    state.module.settle.compile((*arrays, types.int64[::1], types.intp, types.intp, types.boolean))

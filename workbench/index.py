"""Which chunks the engine knows, and in which tiers each one lies: the control plane's only table.

An entry is a small integer, recycled when its chunk is gone everywhere and no known chunk names it as its parent.
Columns are flat arrays, so that a million chunks stay within a few hundred bytes each.
"""

from array import array
from collections.abc import Collection, Iterable

from workbench.chunks import Chunk

__all__ = ["ChunkIndex"]


class ChunkIndex:
    """Chunk key <-> entry, with parent, place in the prompt, children, and one bit a tier.

    A chunk is `resident` in a tier once the data plane has confirmed its bytes, and `pending` from the order to the
    confirmation. Only resident chunks are hits.
    """

    def __init__(self):
        self._entries: dict[bytes, int] = {}
        self._free: list[int] = []
        self.keys: list[bytes | None] = []
        self.parents = array("i")  # entry of the parent, -1 for a first chunk
        self.depths = array("i")  # chunks above it
        self.starts = array("i")  # first token
        self.stops = array("i")
        self.children = array("i")  # children that lie in any tier or are on their way into one
        self.slots = array("i")  # place in the memory arena, -1 for none
        self.resident = array("B")
        self.pending = array("B")
        self._users = array("i")  # running requests that hold the entry, so that it is not recycled
        self._links = array("i")  # known entries that name this one as their parent, resident or not
        self._tops: dict[int, bytes] = {}  # entries without a known parent -> its key: for a first chunk, the root

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: bytes) -> int:
        """Entry of a key, or -1."""
        return self._entries.get(key, -1)

    def leading(self, keys: Iterable[bytes], levels: int) -> int:
        """How many of the keys, from the first on, are resident in one of the levels (bits). Asks for no key more."""
        entries, resident, number = self._entries, self.resident, 0
        for key in keys:
            entry = entries.get(key, -1)
            if entry < 0 or not resident[entry] & levels:
                break
            number += 1
        return number

    def add(self, key: bytes, parent: bytes, start: int, stop: int) -> int:
        """Entry of a chunk, made if there is none. Its parent need not be known."""
        entry = self._entries.get(key, -1)
        above = self._entries.get(parent, -1)
        if entry >= 0:
            if self.parents[entry] < 0 <= above:
                self._link(entry, above)
            return entry
        row = (-1, 0, start, stop, 0, -1, 0, 0, 0, 0)
        columns = (self.parents, self.depths, self.starts, self.stops, self.children, self.slots,
                   self.resident, self.pending, self._users, self._links)  # fmt: skip
        if self._free:
            entry = self._free.pop()
            self.keys[entry] = key
            for column, value in zip(columns, row, strict=True):
                column[entry] = value
        else:
            entry = len(self.keys)
            self.keys.append(key)
            for column, value in zip(columns, row, strict=True):
                column.append(value)
        self._entries[key] = entry
        if above >= 0:
            self._link(entry, above)
        else:
            self._tops[entry] = parent
        return entry

    def parent_key(self, entry: int) -> bytes:
        """Key of the chunk before an entry's; the root before a first chunk."""
        above = self.parents[entry]
        return (self.keys[above] or b"") if above >= 0 else self._tops[entry]

    def under(self, roots: Collection[bytes]) -> set[int]:
        """Entries of all chunks whose prompts begin at one of these roots."""
        inside = {entry: root in roots for entry, root in self._tops.items()}
        for entry in self._entries.values():
            path = []
            while entry not in inside:
                path.append(entry)
                entry = self.parents[entry]
            inside.update(dict.fromkeys(path, inside[entry]))
        return {entry for entry, belongs in inside.items() if belongs}

    def _link(self, entry: int, parent: int) -> None:
        self._tops.pop(entry, None)
        self.parents[entry], self.depths[entry] = parent, self.depths[parent] + 1
        self._links[parent] += 1
        self.children[parent] += self.anywhere(entry)

    def add_chunk(self, chunk: Chunk) -> int:
        return self.add(chunk.key, chunk.parent, chunk.start, chunk.stop)

    def level(self, entry: int) -> int:
        """The fastest tier that surely holds the chunk, or -1."""
        bits = self.resident[entry]
        return (bits & -bits).bit_length() - 1

    def set_pending(self, entry: int, level: int) -> None:
        self._change(entry, self.resident[entry], self.pending[entry] | 1 << level)

    def set_resident(self, entry: int, level: int) -> None:
        bit = 1 << level
        self._change(entry, self.resident[entry] | bit, self.pending[entry] & ~bit)

    def clear(self, entry: int, level: int) -> None:
        """The chunk is not in this tier and not on its way there."""
        bit = ~(1 << level)
        self._change(entry, self.resident[entry] & bit, self.pending[entry] & bit)

    def use(self, entry: int) -> None:
        self._users[entry] += 1

    def unuse(self, entry: int) -> None:
        self._users[entry] -= 1
        assert self._users[entry] >= 0, "an entry was let go more often than it was taken"
        self._recycle(entry)

    def in_use(self, entry: int) -> bool:
        """Whether a running request counts on the chunk."""
        return self._users[entry] > 0

    def anywhere(self, entry: int) -> bool:
        """Whether the chunk lies in any tier or is on its way into one."""
        return bool(self.resident[entry] | self.pending[entry])

    def is_last_copy(self, entry: int, level: int) -> bool:
        return not (self.resident[entry] | self.pending[entry]) & ~(1 << level)

    def _change(self, entry: int, resident: int, pending: int) -> None:
        before = self.anywhere(entry)
        self.resident[entry], self.pending[entry] = resident, pending
        after = self.anywhere(entry)
        parent = self.parents[entry]
        if before != after and parent >= 0:
            self.children[parent] += 1 if after else -1
        if not after:
            self._recycle(entry)

    def _recycle(self, entry: int) -> None:
        """Forget entries that nothing refers to any more, upwards."""
        while entry >= 0:
            key = self.keys[entry]
            if key is None or self.anywhere(entry) or self._links[entry] or self._users[entry]:
                return
            del self._entries[key]
            self._tops.pop(entry, None)
            self.keys[entry] = None
            self._free.append(entry)
            entry = self.parents[entry]
            if entry >= 0:
                self._links[entry] -= 1

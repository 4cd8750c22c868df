"""How far a prompt follows a stored chunk that it does not fill: a hit may end within a chunk, at any token.

parent key -> the chunks that continue it, in the order of their tokens

The chunk that shares the most leading tokens with a prompt stands next to where the prompt itself would stand. Only
chunks stored lately are known here: a prompt that is often continued is also continued lately.
"""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator

from workbench.chunks import Chunk, common_tokens

__all__ = ["Beginnings"]

_MOST_TOKENS = 1 << 22  # 16 MiB of token ids

_Row = tuple[bytes, bytes, int]  # tokens, key, first token: sorted by tokens


class Beginnings:
    """Tokens of the chunks stored last, by what stands before them.

    `along` may be asked while another thread adds and discards: what it then finds is a nomination as ever.

    Args:
        most_tokens: How many are remembered.
    """

    def __init__(self, most_tokens: int = _MOST_TOKENS):
        self._most, self._tokens = most_tokens, 0
        self._rows: dict[bytes, list[_Row]] = {}  # by parent, sorted
        self._places: OrderedDict[bytes, tuple[bytes, _Row]] = OrderedDict()  # key -> (parent, row), oldest first

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: bytes | None) -> bool:
        return key in self._places

    def touch(self, key: bytes) -> bool:
        """Make a chunk the latest; whether it is known."""
        known = key in self
        if known:
            self._places.move_to_end(key)
        return known

    def add(self, chunk: Chunk) -> None:
        """Remember a chunk that is not known, as the latest; the oldest ones make room."""
        row = (chunk.tokens, chunk.key, chunk.start)
        self._places[chunk.key] = chunk.parent, row
        insort(self._rows.setdefault(chunk.parent, []), row)
        self._tokens += chunk.num_tokens
        while self._tokens > self._most:
            self.discard(next(iter(self._places)))

    def discard(self, key: bytes) -> None:
        """Forget a chunk, if it is known."""
        if key not in self:
            return
        parent, row = self._places.pop(key)
        rows = self._rows[parent]
        del rows[bisect_left(rows, row)]
        if not rows:
            del self._rows[parent]
        self._tokens -= len(row[0]) // 4

    def along(self, parent: bytes, tokens: bytes) -> Iterator[tuple[Chunk, int]]:
        """Chunks behind `parent` that begin as `tokens` do, and for how many tokens; the longest agreement first.

        Args:
            parent: Key of the chunk before, or the root.
            tokens: What comes next in a prompt, int32 little-endian as in `Chunk.tokens`.
        """
        rows = self._rows.get(parent, [])
        right = bisect_left(rows, (tokens,))
        left = right - 1
        while True:
            before, behind = _agreement(rows, left, tokens), _agreement(rows, right, tokens)
            if before is None and behind is None:
                return
            if behind is None or (before is not None and before[1] > behind[1]):
                (own, key, start), common = before
                left -= 1
            else:
                (own, key, start), common = behind
                right += 1
            yield Chunk(key, parent, start, start + len(own) // 4, own), common


def _agreement(rows: list[_Row], at: int, tokens: bytes) -> tuple[_Row, int] | None:
    """A row and the leading tokens that it shares; None if there is no such row, or nothing shared."""
    try:
        row = rows[at] if at >= 0 else None
    except IndexError:
        row = None
    common = common_tokens(row[0], tokens) if row is not None else 0
    return (row, common) if common else None

"""A trace: which blocks each request looked up, in order, as flat arrays."""

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import polars as pl

from experiments.traces import tree
from workbench.errors import InvalidInputError

__all__ = ["Trace"]


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests and the blocks of their prompts.

    Attributes:
        name: What the trace is called in results.
        ids: int32[accesses], block ids of all requests one after another; dense, 0 to distinct - 1.
        offsets: int64[requests + 1]; request q has ids[offsets[q]:offsets[q + 1]].
        block_tokens: Tokens of a full block.
        timestamps: float64[requests], seconds.
        input_tokens: int64[requests], prompt length.
        output_tokens: int64[requests].
        tenants: int32[requests], session or chat; zeros if the trace has none.
        block_sizes: int32[distinct] for traces whose blocks differ in size, else None.
        notes: What a reader changed or skipped, for the reader of a result.
    """

    name: str
    ids: np.ndarray
    offsets: np.ndarray
    block_tokens: int
    timestamps: np.ndarray
    input_tokens: np.ndarray
    output_tokens: np.ndarray
    tenants: np.ndarray
    block_sizes: np.ndarray | None = None
    notes: tuple[str, ...] = field(default=())

    def __repr__(self) -> str:
        return (
            f"Trace({self.name!r}: {self.requests:,} requests, {self.accesses:,} block accesses, "
            f"{self.distinct:,} blocks of {self.block_tokens} tokens)"
        )

    @property
    def requests(self) -> int:
        """Number of requests."""
        return len(self.offsets) - 1

    @property
    def accesses(self) -> int:
        """Number of block accesses."""
        return len(self.ids)

    @cached_property
    def distinct(self) -> int:
        """Number of different blocks."""
        return int(self.ids.max()) + 1 if len(self.ids) else 0

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64[requests], blocks of each request."""
        return np.diff(self.offsets)

    @cached_property
    def _tree(self) -> tuple[np.ndarray, np.ndarray, int]:
        return tree.static_tree(self.ids, self.offsets, self.distinct)

    @property
    def parent(self) -> np.ndarray:
        """int32[distinct], the block before each block where it was first seen, -1 for a first block."""
        return self._tree[0]

    @property
    def depth(self) -> np.ndarray:
        """int32[distinct], blocks before each block where it was first seen."""
        return self._tree[1]

    @property
    def conflicts(self) -> int:
        """Accesses whose block stood elsewhere before: 0 if ids name prefixes, as hash ids do."""
        return self._tree[2]

    @cached_property
    def next_use(self) -> np.ndarray:
        """float64[accesses], number of the next request that uses the block, infinity if none does."""
        return tree.next_request(self.ids, self.offsets, self.distinct)

    def as_prefixes(self) -> "Trace":
        """This trace with ids that name prefixes: a block after another prefix is another block.

        A trace whose ids already do so is returned as it is.
        """
        if self.conflicts == 0:
            return self
        ids, origin = tree.prefix_ids(self.ids, self.offsets, self.distinct)
        note = f"{self.conflicts:,} accesses found their block after another prefix; ids were made to name prefixes"
        sizes = None if self.block_sizes is None else self.block_sizes[origin]
        return replace(self, ids=ids, block_sizes=sizes, notes=(*self.notes, note))

    def hit_tokens(self, hit_blocks: np.ndarray) -> np.ndarray:
        """int64[requests]: tokens of the first hit_blocks[q] blocks of each request, at most its prompt."""
        if self.block_sizes is None:
            return np.minimum(hit_blocks * self.block_tokens, self.input_tokens)
        total = np.concatenate([[0], np.cumsum(self.block_sizes[self.ids], dtype=np.int64)])
        return total[self.offsets[:-1] + hit_blocks] - total[self.offsets[:-1]]

    def chunk_tokens(self) -> np.ndarray:
        """int32[distinct]: tokens of each block; a prompt's last block may be partly filled."""
        if self.block_sizes is not None:
            return self.block_sizes
        sizes = np.full(self.distinct, self.block_tokens, np.int32)
        filled = self.lengths > 0
        last = self.ids[self.offsets[1:][filled] - 1]
        rest = self.input_tokens[filled] - (self.lengths[filled] - 1) * self.block_tokens
        sizes[last] = np.minimum(rest, self.block_tokens)
        return sizes

    def coarsen(self, blocks: int) -> "Trace":
        """The same requests with chunks of `blocks` blocks. Only full chunks are kept, as a cache would store them.

        Raises:
            InvalidInputError: blocks is less than 1, or the blocks differ in size.
        """
        if blocks < 1 or self.block_sizes is not None:
            raise InvalidInputError(
                f"cannot make chunks of {blocks} blocks from {self.name}: needs equal blocks and >= 1"
            )
        if blocks == 1:
            return self
        prefixes = self.as_prefixes()
        ids, offsets = tree.coarsen(prefixes.ids, prefixes.offsets, prefixes.distinct, blocks)
        return replace(prefixes, ids=ids, offsets=offsets, block_tokens=self.block_tokens * blocks)

    def head(self, *, requests: int | None = None, accesses: int | None = None) -> "Trace":
        """The first requests: so many, or as many whole ones as fit in so many accesses."""
        if (requests is None) == (accesses is None):
            raise InvalidInputError("head() takes requests or accesses, one of them")
        if requests is None:
            assert accesses is not None
            requests = int(np.searchsorted(self.offsets, accesses, side="right")) - 1
        return self._cut(0, min(requests, self.requests))

    def tail(self, *, accesses: int) -> "Trace":
        """The requests after the first whole ones that fit in so many accesses."""
        return self._cut(int(np.searchsorted(self.offsets, accesses, side="right")) - 1, self.requests)

    def _cut(self, start: int, stop: int) -> "Trace":
        old = self.ids[self.offsets[start] : self.offsets[stop]]
        ids, _ = tree.densify(old)
        rows = slice(start, stop)
        return replace(
            self,
            ids=ids,
            offsets=self.offsets[start : stop + 1] - self.offsets[start],
            timestamps=self.timestamps[rows],
            input_tokens=self.input_tokens[rows],
            output_tokens=self.output_tokens[rows],
            tenants=self.tenants[rows],
            block_sizes=None if self.block_sizes is None else _sizes_in_order(self.block_sizes, old, ids),
        )

    def frame(self) -> pl.DataFrame:
        """One row a request: timestamp (s), input_tokens, output_tokens, tenant, block_ids (list)."""
        blocks = pl.Series("block_ids", np.split(self.ids, self.offsets[1:-1]), dtype=pl.List(pl.Int32))
        return pl.DataFrame(
            {
                "timestamp": self.timestamps,
                "input_tokens": self.input_tokens,
                "output_tokens": self.output_tokens,
                "tenant": self.tenants,
            }
        ).with_columns(blocks)


def _sizes_in_order(sizes: np.ndarray, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Block sizes under the new ids of the same accesses."""
    ordered = np.zeros(int(new.max()) + 1 if len(new) else 0, np.int32)
    ordered[new] = sizes[old]
    return ordered

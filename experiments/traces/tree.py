"""Arrays over block ids: parents and depths, next uses, coarser chunks, dense numbering. Compiled, one pass each."""

import numpy as np
from numba import njit, types
from numba.typed import Dict

__all__ = ["coarsen", "densify", "next_access", "next_request", "prefix_ids", "static_tree", "tokens_before"]


def densify(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number ids from 0 in order of first appearance.

    Args:
        ids: int64[n] or int32[n], not negative.

    Returns:
        (int32[n] dense ids, int64[distinct] the original id of each).
    """
    if len(ids) == 0:
        return np.empty(0, np.int32), np.empty(0, np.int64)
    if int(ids.max()) < 4 * len(ids) + 1024:
        return _densify_by_table(ids, int(ids.max()) + 1)
    values, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    rank = np.empty(len(values), np.int32)
    by_appearance = np.argsort(first)
    rank[by_appearance] = np.arange(len(values), dtype=np.int32)
    return rank[inverse.reshape(-1)], values[by_appearance].astype(np.int64)


@njit(cache=True, nogil=True)
def _densify_by_table(ids, size):
    number = np.full(size, -1, np.int32)
    original = np.empty(min(size, len(ids)), np.int64)
    dense = np.empty(len(ids), np.int32)
    count = 0
    for i in range(len(ids)):
        b = ids[i]
        if number[b] < 0:
            number[b] = count
            original[count] = b
            count += 1
        dense[i] = number[b]
    return dense, original[:count].copy()


@njit(cache=True, nogil=True)
def static_tree(ids, offsets, distinct):
    """(int32 parent[distinct], int32 depth[distinct], accesses that contradict them)."""
    parent = np.full(distinct, -2, np.int32)
    depth = np.full(distinct, -1, np.int32)
    conflicts = 0
    for q in range(len(offsets) - 1):
        above = -1
        for i in range(offsets[q], offsets[q + 1]):
            b = ids[i]
            if parent[b] == -2:
                parent[b] = above
                depth[b] = i - offsets[q]
            elif parent[b] != above or depth[b] != i - offsets[q]:
                conflicts += 1
            above = b
    return parent, depth, conflicts


@njit(cache=True, nogil=True)
def next_request(ids, offsets, distinct):
    """float64[accesses]: number of the next request that uses the block, infinity if none does."""
    following = np.full(distinct, np.inf)
    result = np.empty(len(ids), np.float64)
    for q in range(len(offsets) - 2, -1, -1):
        for i in range(offsets[q], offsets[q + 1]):
            result[i] = following[ids[i]]
        for i in range(offsets[q], offsets[q + 1]):
            following[ids[i]] = q
    return result


@njit(cache=True, nogil=True)
def next_access(ids, distinct):
    """float64[accesses]: index of the next access of the block, infinity if there is none."""
    following = np.full(distinct, np.inf)
    result = np.empty(len(ids), np.float64)
    for i in range(len(ids) - 1, -1, -1):
        result[i] = following[ids[i]]
        following[ids[i]] = i
    return result


@njit(cache=True, nogil=True)
def coarsen(ids, offsets, distinct, blocks):
    """Chunks of `blocks` blocks, named by their last block (which names the whole prefix); full chunks only."""
    new_offsets = np.zeros(len(offsets), np.int64)
    new_ids = np.empty(len(ids) // blocks + 1, np.int32)
    number = np.full(distinct, -1, np.int32)
    count = 0
    n = 0
    for q in range(len(offsets) - 1):
        for i in range(offsets[q] + blocks - 1, offsets[q + 1], blocks):
            b = ids[i]
            if number[b] < 0:
                number[b] = count
                count += 1
            new_ids[n] = number[b]
            n += 1
        new_offsets[q + 1] = n
    return new_ids[:n].copy(), new_offsets


@njit(cache=True, nogil=True)
def prefix_ids(ids, offsets, distinct):
    """Ids that name (prefix, block) pairs: (int32[accesses] new ids, int32[new distinct] the block of each)."""
    seen = Dict.empty(types.int64, types.int64)
    result = np.empty(len(ids), np.int32)
    origin = np.empty(len(ids), np.int32)
    for q in range(len(offsets) - 1):
        above = -1
        for i in range(offsets[q], offsets[q + 1]):
            pair = np.int64(above + 1) * distinct + ids[i]
            if pair not in seen:
                origin[len(seen)] = ids[i]
                seen[pair] = len(seen)
            above = seen[pair]
            result[i] = above
    return result, origin[: len(seen)].copy()


@njit(cache=True, nogil=True)
def tokens_before(parent, depth, tokens):
    """int64[distinct]: tokens above each block. A parent is numbered anywhere, so blocks go by depth."""
    before = np.zeros(len(parent), np.int64)
    for b in np.argsort(depth):
        if parent[b] >= 0:
            before[b] = before[parent[b]] + tokens[parent[b]]
    return before

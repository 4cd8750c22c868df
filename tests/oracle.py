"""What the tests compare with: payloads derived from (key, offset), and an audit that recounts all bookkeeping."""

import hashlib
from collections import Counter

import numpy as np

from kernels.pages import PageTable
from workbench.chunks import ChunkChain, ChunkScope
from workbench.control import ControlPlane
from workbench.layout import Identity, KVLayout

SMALL = KVLayout(num_layers=2, num_kv_heads=1, head_size=16, block_size=4, chunk_tokens=8)
IDENTITY = Identity(layout=SMALL, weights="w")


def payload(key: bytes, layout: KVLayout = SMALL) -> np.ndarray:
    """The only right bytes of a chunk: a function of its key and the offset, nowhere constant."""
    data = hashlib.shake_256(key).digest(layout.chunk_nbytes)
    return np.frombuffer(data, np.uint8).reshape(layout.chunk_shape)


def chain_of(tokens, identity: Identity = IDENTITY, scope: ChunkScope | None = None) -> ChunkChain:
    scope = scope or ChunkScope()
    return ChunkChain(scope.root(identity), identity.layout.chunk_tokens, scope).extend(tokens)


class Pages:
    """A paged KV cache that is filled with, and compared with, the oracle."""

    def __init__(self, num_blocks: int, layout: KVLayout = SMALL):
        self.layout = layout
        self.arrays = [np.zeros((num_blocks, layout.page_nbytes), np.uint8) for _ in range(layout.num_layers)]
        self.table = PageTable(self.arrays)

    def compute(self, chain: ChunkChain, blocks, first_chunk: int = 0) -> None:
        """What a model does: KV of every full chunk from `first_chunk` on."""
        for number in range(first_chunk, len(chain)):
            for layer, part in enumerate(payload(chain[number].key, self.layout)):
                self.arrays[layer][self._own(blocks, number)] = part

    def spoil(self, rng: np.random.Generator) -> None:
        for array in self.arrays:
            array[:] = rng.integers(0, 256, array.shape, np.uint8)

    def wrong_chunks(self, chain: ChunkChain, blocks, tokens: int) -> list[int]:
        """Chunks before `tokens` whose pages differ from the oracle."""
        return [n for n in range(tokens // self.layout.chunk_tokens) if not self.holds(chain, blocks, n)]

    def holds(self, chain: ChunkChain, blocks, number: int) -> bool:
        expected = payload(chain[number].key, self.layout)
        own = self._own(blocks, number)
        return all(np.array_equal(self.arrays[layer][own], part) for layer, part in enumerate(expected))

    def _own(self, blocks, number: int) -> list[int]:
        per_chunk = self.layout.blocks_per_chunk
        return list(blocks[number * per_chunk : (number + 1) * per_chunk])


def audit(control: ControlPlane, *, at_rest: bool = True) -> None:
    """Recount everything that the control plane counts as it goes."""
    index = control.index
    known = set(index._entries.values())
    assert known.isdisjoint(index._free) and len(known) + len(index._free) == len(index.keys)
    assert len(set(index._free)) == len(index._free)
    children, links = Counter(), Counter()
    for entry in known:
        parent = index.parents[entry]
        if parent >= 0:
            assert parent in known, "an entry outlived the one that it names as its parent"
            assert index.starts[entry] == index.stops[parent]
            links[parent] += 1
            children[parent] += index.anywhere(entry)
    assert all(index.children[e] == children[e] and index._links[e] == links[e] for e in known)
    for level, tier in enumerate(control.tiers):
        here = {e for e in known if (index.resident[e] | index.pending[e]) >> level & 1}
        assert here == set(tier.entries()), f"{tier.name}: the index and the tier disagree"
        assert tier.used_bytes == sum(tier._nbytes.values())
        assert tier.used_bytes <= tier.high_water_bytes <= tier.capacity_bytes
        assert all(count > 0 for count in tier._holds.values())
        if at_rest:
            assert tier.holds == 0 and not any(index.pending)
            assert len(tier.order) == len(tier), f"{tier.name}: a chunk is in no order, so it can never leave"
    assert set(control._awaited) == {
        (e, level) for e in known for level in range(len(control.tiers)) if index.pending[e] >> level & 1
    }, "something is pending without a deadline"
    if control.memory is not None:
        taken = [index.slots[e] for e in control.memory.entries()]
        slots = control.memory.capacity_bytes // control.layout.chunk_nbytes
        assert sorted(taken + control._free_slots) == list(range(slots)), "an arena slot is lost or given twice"
    if at_rest:
        assert not control._running and not control._writing and not control._rising
        assert all(index.anywhere(e) or index._links[e] for e in known), "an entry is kept for nothing"


def orphans(control: ControlPlane) -> list[int]:
    """Chunks that lie somewhere while the chunk before them lies nowhere."""
    index = control.index
    found = []
    for entry in index._entries.values():
        parent = index.parents[entry]
        if index.anywhere(entry) and index.starts[entry] and (parent < 0 or not index.anywhere(parent)):
            found.append(entry)
    return found

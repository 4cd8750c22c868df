"""Contracts that policies keep. Run them on your own class: check_policy(MyPolicy)."""

import random
from typing import Any

from workbench.errors import InvalidInputError
from workbench.policies import resolve_policy
from workbench.policies.base import take_form
from workbench.policies.live import LivePolicy

__all__ = ["check_policy"]


def check_policy(spec: Any, *, steps: int = 400, seed: int = 0) -> None:
    """Hold a policy to its contract on random requests; an AssertionError says which promise broke.

    Victims are chunks that are held, not pinned and without resident children; what was inserted comes out exactly
    once; removal and reuse of indices confuse nothing; the class compiled and as plain Python names the same victims.

    Args:
        spec: A policy class, instance or name; see workbench.policies.resolve_policy.
        steps: Requests to make up.
        seed: Of the requests.

    Raises:
        InvalidInputError: It is no policy, or one for replay only.
        PolicyError: evict() named a chunk that is not in the order.
    """
    chosen = resolve_policy(spec)
    if steps < 1:
        raise InvalidInputError(f"steps must be at least 1, got {steps}")
    for removals in (False, True):
        _Walk(LivePolicy(chosen, capacity_chunks=24), seed, removals=removals).run(steps)
    compiled = _Walk(LivePolicy(chosen, capacity_chunks=24), seed, removals=False).run(steps)
    plain = _Walk(LivePolicy(_plain(chosen), capacity_chunks=24), seed, removals=False).run(steps)
    assert compiled == plain, f"{chosen!r} names other victims compiled than as plain Python"


def _plain(chosen: Any) -> Any:
    """The same policy with the same settings, never compiled."""
    plain = take_form(type(type(chosen).__name__, (type(chosen),), {"compile": False}))
    twin = object.__new__(plain)
    twin.__dict__.update(chosen.__dict__)
    return twin


class _Walk:
    """Random requests over a tree of prompts, driven as an engine drives an order, with every answer checked."""

    def __init__(self, order: LivePolicy, seed: int, *, removals: bool):
        self.order, self.rng, self.removals = order, random.Random(seed), removals
        self.index: dict[tuple[int, ...], int] = {}  # path -> index, for what is held
        self.free = list(range(64))
        self.victims: list[tuple[int, ...]] = []

    def run(self, steps: int) -> list[tuple[int, ...]]:
        """All victims, in order; at the end everything is drained."""
        for step in range(steps):
            self.order.begin(step, step * 0.5)
            self.request()
            if self.removals and step % 7 == 0:
                self.remove()
        self.order.begin(steps, steps * 0.5)
        while self.index:
            self.evict(pinned=())
        assert self.order.victim() == -1 and len(self.order) == 0, "more victims than chunks"
        return self.victims

    def request(self) -> None:
        """One prompt: hits, then inserts with evictions; its chunks are pinned meanwhile."""
        path: tuple[int, ...] = tuple(self.rng.randrange(3) for _ in range(self.rng.randint(1, 7)))
        chain = [path[: n + 1] for n in range(len(path))]
        pinned = []
        for node in chain:
            if node not in self.index:
                break
            self.order.hit(self.index[node])
            self.order.pin(self.index[node])
            pinned.append(node)
        for node in chain[len(pinned) :]:
            if len(self.index) >= 24:
                self.evict(pinned)
            self.index[node] = self.free.pop(self.rng.randrange(len(self.free)))
            above = self.index[node[:-1]] if len(node) > 1 else -1
            about = {"depth": len(node) - 1, "tokens": 16, "nbytes": 1024, "tenant": chain[0][0]}
            costs = {"recompute_seconds": 0.01 * len(node), "load_seconds": 0.005}
            self.order.insert(self.index[node], parent=above, key=hash(node), **about, **costs)
            self.order.pin(self.index[node])
            pinned.append(node)
        for node in pinned:
            self.order.unpin(self.index[node])

    def evict(self, pinned: Any) -> None:
        """One victim, checked."""
        c = self.order.victim()
        held = {index: node for node, index in self.index.items()}
        assert c in held, f"victim {c} is not held; {len(held)} chunks are"
        node = held[c]
        assert node not in pinned, f"victim {node} is pinned"
        assert not any(other[:-1] == node for other in self.index), f"victim {node} has resident children"
        del self.index[node]
        self.free.append(c)
        self.victims.append(node)

    def remove(self) -> None:
        """Take a leaf out on request; its index is free at once."""
        leaves = [node for node in self.index if not any(other[:-1] == node for other in self.index)]
        if leaves:
            node = self.rng.choice(leaves)
            self.order.remove(self.index[node])
            self.free.append(self.index.pop(node))

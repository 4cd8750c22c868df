"""Every policy in the live engine: the tier names the same victims as replay, request by request, in the same order."""

from dataclasses import replace

import numpy as np
import pytest
from oracle import SMALL, chain_of

from experiments.replay import replay
from experiments.replay_costs import ReuseCosts
from experiments.traces import Trace
from tests.test_live_policy import LIVE, random_requests
from workbench.control import ControlPlane
from workbench.orders import Done, Store
from workbench.tiers.base import TierIndex

TOKENS = SMALL.chunk_tokens
# What the engine tells a policy of a chunk, as a cost model: no load time, bytes as they lie in the tier.
COSTS = ReuseCosts(
    load_bytes_per_second=float("inf"), value_bytes=SMALL.chunk_nbytes / TOKENS / (2 * 80 * 8192 / 8), layers=80
)
# W-TinyLFU counts under hashes of the key, and the engine's keys are not the numbers of a trace.
KNOWS_KEYS = {"tinylfu"}


def prompts(trace: Trace) -> list[np.ndarray]:
    """Token ids of each request: block b of the trace is the same tokens wherever it stands."""
    blocks = np.arange(trace.distinct * TOKENS).reshape(-1, TOKENS)
    return [blocks[trace.ids[a:b]].ravel() for a, b in zip(trace.offsets[:-1], trace.offsets[1:], strict=True)]


def engine_victims(trace: Trace, name: str, capacity: int) -> list[int]:
    """Drive the control plane as the engine does, and read the evictions from its events; as blocks of the trace."""
    clock = [0.0]
    tier = TierIndex("memory", 0, capacity * SMALL.chunk_nbytes, chunk_nbytes=SMALL.chunk_nbytes, policy=name)
    before = COSTS.recompute_seconds
    control = ControlPlane(
        SMALL, [tier], arena=True, clock=lambda: clock[0],
        recompute_seconds=lambda start, stop: float(before(np.array(start), np.array(stop))),
    )  # fmt: skip
    block_of: dict[str, int] = {}
    for q, tokens in enumerate(prompts(trace)):
        clock[0] = float(trace.timestamps[q])
        chain = chain_of(tokens)
        for number in range(len(chain)):
            block_of[chain[number].key.hex()] = int(tokens[number * TOKENS] // TOKENS)
        request, blocks = str(q), range(len(tokens))
        hit = control.lookup(chain)
        control.admit(request, chain, reuse_tokens=hit)
        loads = control.plan_loads(request, 0, hit, blocks)
        stores = control.plan_stores(request, min(len(tokens), capacity * TOKENS), blocks)
        control.apply([done(order, "load") for order in loads])
        control.apply([done(order, "store") for order in stores if isinstance(order, Store)])
        control.finish(request)
    return [block_of[event.key] for event in control.record.events if event.kind == "evict"]


def done(order, kind: str) -> Done:
    """What the data plane says when an order was carried out."""
    return Done(kind, order.request, order.attempt, order.chunk.key, 0, SMALL.chunk_nbytes, 0.0, "")


@pytest.mark.parametrize("name", sorted(set(LIVE) - KNOWS_KEYS))
def test_the_engine_names_the_victims_of_replay(name):
    total = 0
    for seed in range(3):
        trace = random_requests(seed, requests=100)
        trace = replace(
            trace, block_tokens=TOKENS, input_tokens=trace.lengths * TOKENS, tenants=np.zeros(trace.requests, np.int32)
        )
        for capacity in (7, 25):
            expected = replay(trace, name, capacity_chunks=capacity, costs=COSTS, record_victims=True).victims.tolist()
            assert engine_victims(trace, name, capacity) == expected, (seed, capacity)
            total += len(expected)
    assert total > 150, "the walks must really evict"

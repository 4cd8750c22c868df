"""A policy in vLLM's own offloading manager, beside our replay of the same trace at the same capacity.

    check_in_vllm(MyPolicy, trace, capacity_chunks=400).text

The manager runs without a model or a GPU. It holds blocks without their parents and protects no prefix, so the two
figures differ a little, more so for policies that look at what comes in.
"""

from dataclasses import dataclass
from typing import Any

from experiments.replay import replay
from experiments.traces import Trace
from experiments.units import share_text
from workbench.errors import CacheError
from workbench.policies import resolve_policy

__all__ = ["VllmCheck", "check_in_vllm", "vllm_hit_chunks"]


class VllmMissingError(CacheError):
    """vLLM is not installed, or too old to load policies of others."""


@dataclass(frozen=True)
class VllmCheck:
    """Hit rates by chunks of one policy on one trace at one capacity.

    Args:
        policy: The policy, with its settings.
        capacity_chunks: Chunks the cache held.
        in_vllm: Hit chunks / looked-up chunks, counted in vLLM's manager.
        in_replay: The same, counted by our replay.
    """

    policy: str
    capacity_chunks: int
    in_vllm: float
    in_replay: float

    @property
    def text(self) -> str:
        """Both figures and their difference, in words."""
        return (
            f"{self.policy} in vLLM's own manager: {share_text(self.in_vllm)} of chunks hit; in our replay "
            f"{share_text(self.in_replay)}; difference {100 * (self.in_replay - self.in_vllm):+.1f} points "
            f"at {self.capacity_chunks:,} chunks."
        )


def check_in_vllm(policy: Any, trace: Trace, *, capacity_chunks: int) -> VllmCheck:
    """Replay a trace in both.

    Args:
        policy: A policy class, instance or name.
        trace: Its ids are made to name prefixes.
        capacity_chunks: Chunks the cache holds; a longer request is not stored by vLLM.

    Raises:
        VllmMissingError: vLLM is missing or too old.
    """
    chosen, trace = resolve_policy(policy), trace.as_prefixes()
    hits = vllm_hit_chunks(trace, chosen, capacity_chunks)
    ours = replay(trace, chosen, capacity_chunks=capacity_chunks)
    return VllmCheck(repr(chosen), capacity_chunks, hits / max(1, trace.accesses), ours.hit_rate_by_chunks)


def vllm_hit_chunks(trace: Trace, policy: Any, capacity_chunks: int) -> int:
    """Chunks that vLLM's CPU offloading manager finds, asked as its scheduler asks: one request after another."""
    try:
        from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        from workbench.policies.vllm_offload import offload_policy
    except ImportError as error:
        raise VllmMissingError(f"vLLM 0.32 or later is needed for this: {error}") from error

    manager = CPUOffloadingManager(capacity_chunks)
    manager._policy = offload_policy(policy)(cache_capacity=capacity_chunks)  # an object, which the factory cannot name
    keys = [make_offload_key(block.to_bytes(32, "little"), 0) for block in range(trace.distinct)]
    hits = 0
    for number in range(trace.requests):
        chain = [keys[block] for block in trace.ids[trace.offsets[number] : trace.offsets[number + 1]].tolist()]
        request = ReqContext(req_id=str(number))
        manager.on_new_request(request)
        found = next((n for n, key in enumerate(chain) if manager.lookup(key, request) != LookupResult.HIT), len(chain))
        hits += found
        manager.prepare_load(chain[:found], request)
        manager.complete_load(chain[:found], request)
        stored = manager.prepare_store(chain, request)
        if stored is not None:
            manager.complete_store(stored.keys_to_store, request)
        manager.on_request_finished(request)
    return hits

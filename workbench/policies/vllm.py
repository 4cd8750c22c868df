"""The order of vLLM's own prefix cache."""

from workbench.policies.base import policy
from workbench.policies.lru import Lru

__all__ = ["Vllm"]


@policy
class Vllm(Lru):
    """LRU over blocks that no running request uses; with touch order tail first a request's last block goes first.

    After vLLM 0.32, vllm/v1/core/block_pool.py: a finished request's blocks join the free queue in reverse.
    """

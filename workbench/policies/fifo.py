"""First in, first out."""

from workbench.policies.base import policy
from workbench.policies.lru import Lru

__all__ = ["Fifo"]


@policy
class Fifo(Lru):
    """Evicts the chunk that was inserted longest ago; hits change nothing."""

    def on_hit(self, c):
        pass

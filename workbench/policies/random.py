"""Random eviction."""

from workbench.policies.base import policy
from workbench.policies.pool import Pool

__all__ = ["Random"]


@policy
class Random(Pool):
    """Evicts any chunk; `seed` makes runs repeatable."""

    def on_hit(self, c):
        pass

    def evict(self):
        c = self.draw()
        self.leave(c)
        return c

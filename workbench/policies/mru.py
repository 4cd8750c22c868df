"""Most recently used, as in SGLang's set."""

from workbench.policies.base import policy
from workbench.policies.lru import Lru

__all__ = ["Mru"]


@policy
class Mru(Lru):
    """Evicts the chunk used last: right for loops longer than the cache, wrong for most else."""

    def evict(self):
        c = self.newest
        self.unlink(c)
        return c

    def on_return(self, c):
        self.append(c)

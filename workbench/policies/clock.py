"""CLOCK, also called second chance or FIFO-reinsertion."""

from workbench.policies.base import policy
from workbench.policies.lru import Lru

__all__ = ["Clock"]


@policy
class Clock(Lru):
    """A FIFO queue in which a chunk that was hit goes round once more."""

    fields = dict(Lru.fields, referenced="u1")

    def on_hit(self, c):
        self.referenced[c] = 1

    def evict(self):
        c = self.oldest
        while self.referenced[c]:
            self.referenced[c] = 0
            self.unlink(c)
            self.append(c)
            c = self.oldest
        self.unlink(c)
        return c

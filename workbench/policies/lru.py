"""Least recently used."""

from workbench.policies.base import policy

__all__ = ["Lru"]


@policy
class Lru:
    """Evicts the chunk that was used longest ago. With touch order tail first this is the order of vLLM's own cache."""

    fields = dict(older="i4", newer="i4")
    scalars = dict(oldest=-1, newest=-1)

    def on_hit(self, c):
        self.unlink(c)
        self.append(c)

    def on_insert(self, c):
        self.append(c)

    def evict(self):
        c = self.oldest
        self.unlink(c)
        return c

    def on_remove(self, c):
        self.unlink(c)

    def on_return(self, c):
        first = self.oldest
        self.older[c] = -1
        self.newer[c] = first
        if first >= 0:
            self.older[first] = c
        else:
            self.newest = c
        self.oldest = c

    def append(self, c):
        last = self.newest
        self.older[c] = last
        self.newer[c] = -1
        if last >= 0:
            self.newer[last] = c
        else:
            self.oldest = c
        self.newest = c

    def unlink(self, c):
        older = self.older[c]
        newer = self.newer[c]
        if older >= 0:
            self.newer[older] = newer
        else:
            self.oldest = newer
        if newer >= 0:
            self.older[newer] = older
        else:
            self.newest = older

"""Segmented LRU (Karedla et al., 1994) with four equal segments, as libCacheSim has it."""

from workbench.policies.base import policy
from workbench.policies.queues import Queues

__all__ = ["Slru"]

SEGMENTS = 4


@policy
class Slru(Queues):
    """A hit moves a chunk one segment up; what a full segment has no room for falls one down.

    Segments are queues 1 (evicted first) to 4. A new chunk goes to the lowest segment that has room.
    """

    def on_hit(self, c):
        q = self.queue[c]
        self.unlink(c)
        if q < SEGMENTS:
            q += 1
            self.make_room(q)
        self.append(q, c)

    def room(self):
        return max(1, self.capacity // SEGMENTS)

    def make_room(self, q):
        room = self.room()
        while q > 1 and self.length[q] >= room:
            falling = self.pop(q)
            q -= 1
            self.append(q, falling)
            if self.length[q] <= room:
                return

    def on_insert(self, c):
        q = 1
        while q <= SEGMENTS and self.length[q] >= self.room():
            q += 1
        self.append(q if q <= SEGMENTS else 1, c)

    def evict(self):
        q = 1
        while self.length[q] == 0:
            q += 1
        return self.pop(q)

    def on_return(self, c):
        self.prepend(1, c)

    def on_remove(self, c):
        self.unlink(c)

"""S3-FIFO (Yang et al., SOSP 2023), with the rules of libCacheSim's implementation."""

from workbench.policies.base import policy
from workbench.policies.queues import Queues

__all__ = ["S3Fifo"]

SMALL, MAIN, GHOST, RETURNING = 1, 2, 3, 4
PROMOTED_AT = 2  # hits in the small queue that take a chunk to the main one
MOST_HITS = 3


@policy
class S3Fifo(Queues):
    """A small queue filters what is used once, a ghost queue remembers it, a main queue keeps the rest.

    Until the first eviction, what the small queue has no room for goes to the main queue.
    """

    fields = dict(Queues.fields, count="u1", home="u1")
    scalars = dict(small_share=0.1, ghost_share=0.9, full=0)

    def on_hit(self, c):
        if self.count[c] < MOST_HITS:
            self.count[c] += 1

    def on_insert(self, c):
        self.count[c] = 0
        if self.queue[c] >= GHOST:
            self.move(c, MAIN)
        elif self.full == 0 and self.length[SMALL] >= int(self.capacity * self.small_share):
            self.append(MAIN, c)
        else:
            self.append(SMALL, c)

    def evict(self):
        self.full = 1
        self.spare(self.incoming)
        main_size = self.capacity - int(self.capacity * self.small_share)
        while True:
            if self.length[MAIN] > main_size or self.length[SMALL] == 0:
                return self.evict_main()
            c = self.evict_small()
            if c >= 0:
                return c

    def spare(self, c):
        """What comes back now must not be forgotten for what is evicted now."""
        if c >= 0 and self.queue[c] == GHOST:
            self.move(c, RETURNING)

    def evict_main(self):
        c = self.oldest[MAIN]
        while self.count[c] > 0:
            self.count[c] -= 1
            self.move(c, MAIN)
            c = self.oldest[MAIN]
        self.unlink(c)
        self.home[c] = MAIN
        return c

    def evict_small(self):
        while self.length[SMALL] > 0:
            c = self.pop(SMALL)
            if self.count[c] < PROMOTED_AT:
                self.home[c] = SMALL
                self.append(GHOST, c)
                if self.length[GHOST] > int(self.capacity * self.ghost_share):
                    self.pop(GHOST)
                return c
            self.count[c] = 0
            self.append(MAIN, c)
        return -1

    def on_return(self, c):
        if self.queue[c] == GHOST:
            self.unlink(c)
        self.prepend(self.home[c], c)

    def on_remove(self, c):
        self.unlink(c)

    def is_ghost(self, c):
        return self.queue[c] >= GHOST

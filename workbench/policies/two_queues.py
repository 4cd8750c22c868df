"""2Q, full version (Johnson and Shasha, VLDB 1994)."""

from workbench.policies.base import policy
from workbench.policies.queues import Queues

__all__ = ["TwoQueues"]

RECENT, OFTEN, GHOST, RETURNING = 1, 2, 3, 4  # A1in, Am, A1out of the paper, what is on its way back


@policy
class TwoQueues(Queues):
    """New chunks pass a FIFO queue; those that come back after leaving it join an LRU queue."""

    fields = dict(Queues.fields, home="u1")
    scalars = dict(recent_share=0.25, ghost_share=0.5)

    def on_hit(self, c):
        if self.queue[c] == OFTEN:
            self.move(c, OFTEN)

    def on_insert(self, c):
        if self.queue[c] >= GHOST:
            self.move(c, OFTEN)
        else:
            self.append(RECENT, c)

    def evict(self):
        if self.incoming >= 0 and self.queue[self.incoming] == GHOST:
            self.move(self.incoming, RETURNING)  # not to be forgotten for what is evicted now
        if self.length[RECENT] > int(self.capacity * self.recent_share) or self.length[OFTEN] == 0:
            c = self.pop(RECENT)
            self.home[c] = RECENT
            self.append(GHOST, c)
            if self.length[GHOST] > int(self.capacity * self.ghost_share):
                self.pop(GHOST)
            return c
        c = self.pop(OFTEN)
        self.home[c] = OFTEN
        return c

    def on_return(self, c):
        if self.queue[c] == GHOST:
            self.unlink(c)
        self.prepend(self.home[c], c)

    def on_remove(self, c):
        self.unlink(c)

    def is_ghost(self, c):
        return self.queue[c] >= GHOST

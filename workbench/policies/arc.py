"""ARC (Megiddo and Modha, FAST 2003)."""

from workbench.policies.base import policy
from workbench.policies.queues import Queues

__all__ = ["Arc"]

ONCE, OFTEN, GHOST_ONCE, GHOST_OFTEN = 1, 2, 3, 4  # T1, T2, B1, B2 of the paper


@policy
class Arc(Queues):
    """Two LRU queues, for chunks seen once and often, whose shares follow hits on what each evicted last."""

    fields = dict(Queues.fields, home="u1")
    scalars = dict(target=0.0, adapted=-1)  # target is the paper's p, the wanted length of ONCE

    def on_hit(self, c):
        self.move(c, OFTEN)

    def on_insert(self, c):
        q = self.queue[c]
        if q == GHOST_ONCE or q == GHOST_OFTEN:
            self.adapt(c)
            self.move(c, OFTEN)
        else:
            self.append(ONCE, c)
        self.adapted = -1

    def evict(self):
        coming = 0
        if self.incoming >= 0:
            coming = self.queue[self.incoming]
        if coming == GHOST_ONCE or coming == GHOST_OFTEN:
            self.adapt(self.incoming)
        elif self.length[ONCE] + self.length[GHOST_ONCE] >= self.capacity:
            if self.length[GHOST_ONCE] == 0:
                c = self.pop(ONCE)
                self.home[c] = ONCE
                return c
            self.pop(GHOST_ONCE)
        elif self.remembered() >= 2 * self.capacity and self.length[GHOST_OFTEN] > 0:
            self.pop(GHOST_OFTEN)
        return self.replace(coming == GHOST_OFTEN)

    def replace(self, from_often):
        once = self.length[ONCE]
        q = OFTEN
        if once > 0 and (once > self.target or (from_often and once == self.target) or self.length[OFTEN] == 0):
            q = ONCE
        c = self.pop(q)
        self.home[c] = q
        self.append(q + 2, c)
        return c

    def adapt(self, c):
        """Once for each return of a ghost, before room is made for it."""
        if self.adapted == c:
            return
        self.adapted = c
        once = self.length[GHOST_ONCE]
        often = self.length[GHOST_OFTEN]
        if self.queue[c] == GHOST_ONCE:
            self.target = min(float(self.capacity), self.target + max(often / once, 1.0))
        else:
            self.target = max(0.0, self.target - max(once / often, 1.0))

    def remembered(self):
        return self.length[ONCE] + self.length[OFTEN] + self.length[GHOST_ONCE] + self.length[GHOST_OFTEN]

    def on_return(self, c):
        if self.queue[c] > 0:
            self.unlink(c)
        self.prepend(self.home[c], c)

    def on_remove(self, c):
        self.unlink(c)

    def is_ghost(self, c):
        return self.queue[c] >= GHOST_ONCE

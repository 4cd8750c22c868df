"""LIRS (Jiang and Zhang, SIGMETRICS 2002)."""

from workbench.policies.base import policy
from workbench.policies.queues import Queues

__all__ = ["Lirs"]

SHORT, LONG, GONE = 1, 2, 3  # a chunk's reuse distance is short (LIR), long (resident HIR), or it is remembered only
WAITING, REMEMBERED = 1, 2  # queues: Q of the paper; what is remembered, oldest first


@policy
class Lirs(Queues):
    """Keeps chunks whose last two uses lie close together; a small share of the cache tries out the others.

    The stack (S of the paper) runs from its bottom, always a chunk of short distance, to its top, used last.
    """

    fields = dict(Queues.fields, kind="u1", stacked="u1", below="i4", above="i4")
    scalars = dict(trial_share=0.01, stack_share=2.0, top=-1, bottom=-1, stack_length=0, short_count=0)

    def on_hit(self, c):
        if self.kind[c] == SHORT:
            self.restack(c)
            self.prune()
        elif self.stacked[c]:
            self.unlink(c)
            self.become_short(c)
        else:
            self.restack(c)
            self.move(c, WAITING)

    def on_insert(self, c):
        if self.kind[c] == GONE:
            self.unlink(c)
            self.become_short(c)
        elif self.short_count < self.short_room():
            self.kind[c] = SHORT
            self.short_count += 1
            self.restack(c)
        else:
            self.kind[c] = LONG
            self.restack(c)
            self.append(WAITING, c)

    def evict(self):
        if self.length[WAITING] == 0:
            self.demote_bottom()
        c = self.pop(WAITING)
        if self.stacked[c]:
            self.kind[c] = GONE
            self.append(REMEMBERED, c)
            while self.stack_length > int(self.capacity * self.stack_share) and self.length[REMEMBERED] > 1:
                self.forget(self.oldest[REMEMBERED])
        else:
            self.kind[c] = 0
        return c

    def on_return(self, c):
        if self.kind[c] == GONE:
            self.unlink(c)
        self.kind[c] = LONG
        self.prepend(WAITING, c)

    def on_remove(self, c):
        if self.kind[c] == SHORT:
            self.short_count -= 1
        else:
            self.unlink(c)
        if self.stacked[c]:
            self.unstack(c)
            self.prune()
        self.kind[c] = 0

    def is_ghost(self, c):
        return self.kind[c] == GONE

    def short_room(self):
        return max(1, self.capacity - max(1, int(self.capacity * self.trial_share)))

    def become_short(self, c):
        self.kind[c] = SHORT
        self.short_count += 1
        self.restack(c)
        if self.short_count > self.short_room():
            self.demote_bottom()
        self.prune()

    def demote_bottom(self):
        self.prune()
        c = self.bottom
        self.unstack(c)
        self.kind[c] = LONG
        self.short_count -= 1
        self.append(WAITING, c)
        self.prune()

    def prune(self):
        """The bottom of the stack is a chunk of short distance; what lies below it says nothing."""
        while self.bottom >= 0 and self.kind[self.bottom] != SHORT:
            c = self.bottom
            if self.kind[c] == GONE:
                self.forget(c)
            else:
                self.unstack(c)

    def forget(self, c):
        self.unlink(c)
        self.unstack(c)
        self.kind[c] = 0

    def restack(self, c):
        if self.stacked[c]:
            self.unstack(c)
        self.stacked[c] = 1
        self.stack_length += 1
        top = self.top
        self.below[c] = top
        self.above[c] = -1
        if top >= 0:
            self.above[top] = c
        else:
            self.bottom = c
        self.top = c

    def unstack(self, c):
        below = self.below[c]
        above = self.above[c]
        if below >= 0:
            self.above[below] = above
        else:
            self.bottom = above
        if above >= 0:
            self.below[above] = below
        else:
            self.top = below
        self.stacked[c] = 0
        self.stack_length -= 1

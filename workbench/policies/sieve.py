"""SIEVE (Zhang et al., NSDI 2024)."""

from workbench.policies.base import policy

__all__ = ["Sieve"]


@policy
class Sieve:
    """One queue, one visited bit, one hand that goes from old to new and unmarks what it passes."""

    fields = dict(visited="u1", newer="i4", older="i4")
    scalars = dict(head=-1, tail=-1, hand=-1)

    def on_hit(self, c):
        self.visited[c] = 1

    def on_insert(self, c):
        self.visited[c] = 0
        head = self.head
        self.newer[c] = -1
        self.older[c] = head
        if head >= 0:
            self.newer[head] = c
        else:
            self.tail = c
        self.head = c

    def evict(self):
        c = self.hand
        if c < 0:
            c = self.tail
        while self.visited[c]:
            self.visited[c] = 0
            newer = self.newer[c]
            c = newer if newer >= 0 else self.tail
        self.hand = c
        self.on_remove(c)
        return c

    def on_remove(self, c):
        newer = self.newer[c]
        older = self.older[c]
        if self.hand == c:
            self.hand = newer
        if newer >= 0:
            self.older[newer] = older
        else:
            self.head = older
        if older >= 0:
            self.newer[older] = newer
        else:
            self.tail = newer

    def on_return(self, c):
        """Back under the hand, so that it is looked at next."""
        newer = self.hand
        if newer < 0:
            self.on_insert(c)
        else:
            older = self.older[newer]
            self.newer[c] = newer
            self.older[c] = older
            self.older[newer] = c
            if older >= 0:
                self.newer[older] = c
            else:
                self.tail = c
        self.hand = c

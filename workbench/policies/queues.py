"""Several queues of chunks: what policies with more than one list are written on."""

__all__ = ["Queues"]


class Queues:
    """Up to 31 doubly linked queues, numbered from 1; a chunk is in one of them (`queue[c]`) or in none (0).

    A base for policies, not one itself. A queue runs from its oldest chunk to its newest.
    """

    fields = dict(older="i4", newer="i4", queue="u1")
    table = dict(oldest="i4", newest="i4", length="i8")
    table_size = 0
    table_min = 32

    def append(self, q, c):
        """At the newest end."""
        self.queue[c] = q
        self.newer[c] = -1
        if self.length[q] > 0:
            last = self.newest[q]
            self.older[c] = last
            self.newer[last] = c
        else:
            self.older[c] = -1
            self.oldest[q] = c
        self.newest[q] = c
        self.length[q] += 1

    def prepend(self, q, c):
        """At the oldest end."""
        self.queue[c] = q
        self.older[c] = -1
        if self.length[q] > 0:
            first = self.oldest[q]
            self.newer[c] = first
            self.older[first] = c
        else:
            self.newer[c] = -1
            self.newest[q] = c
        self.oldest[q] = c
        self.length[q] += 1

    def unlink(self, c):
        """Out of its queue."""
        q = self.queue[c]
        older = self.older[c]
        newer = self.newer[c]
        if older >= 0:
            self.newer[older] = newer
        else:
            self.oldest[q] = newer
        if newer >= 0:
            self.older[newer] = older
        else:
            self.newest[q] = older
        self.length[q] -= 1
        self.queue[c] = 0

    def move(self, c, q):
        """To the newest end of queue q."""
        self.unlink(c)
        self.append(q, c)

    def pop(self, q):
        """Take the oldest chunk out."""
        c = self.oldest[q]
        self.unlink(c)
        return c

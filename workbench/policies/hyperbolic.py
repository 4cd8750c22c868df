"""Hyperbolic caching (Blankstein, Sen and Freedman, ATC 2017)."""

from workbench.policies.base import policy
from workbench.policies.pool import Pool

__all__ = ["Hyperbolic"]


@policy
class Hyperbolic(Pool):
    """Of some chunks drawn at random, evicts the one with the fewest uses per time since it was inserted.

    Time is counted in requests. The lead over the others fades as all age, so the least is sought anew each time.
    """

    fields = dict(Pool.fields, uses="f8", since="f8")
    scalars = dict(Pool.scalars, samples=64)

    def on_hit(self, c):
        self.uses[c] += 1.0

    def on_insert(self, c):
        self.uses[c] = 1.0
        self.since[c] = self.request
        self.join(c)

    def evict(self):
        worst = self.draw()
        for _ in range(self.samples - 1):
            c = self.draw()
            if self.rate(c) < self.rate(worst):
                worst = c
        self.leave(worst)
        return worst

    def rate(self, c):
        return self.uses[c] / (self.request - self.since[c] + 1.0)

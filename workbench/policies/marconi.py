"""Marconi's FLOP-aware eviction (Pan et al., MLSys 2025), on a sample of chunks."""

from workbench.policies.base import policy
from workbench.policies.pool import Pool

__all__ = ["Marconi"]


@policy
class Marconi(Pool):
    """Evicts the least of recency plus `alpha` times prefill saved for each byte, both scaled to 0..1 over a sample.

    The paper scales over all nodes with at most one child and tunes alpha at run time; here it is a setting and the
    least of `samples` chunks drawn at random goes.
    """

    fields = dict(Pool.fields, used="f8")
    scalars = dict(Pool.scalars, samples=64, alpha=1.0)

    def on_hit(self, c):
        self.used[c] = self.request

    def on_insert(self, c):
        self.used[c] = self.request
        self.join(c)

    def evict(self):
        start = self.seed
        low_r = 1.0
        high_r = 0.0
        low_e = 1e300
        high_e = 0.0
        for _ in range(self.samples):
            c = self.draw()
            low_r = min(low_r, self.recency(c))
            high_r = max(high_r, self.recency(c))
            low_e = min(low_e, self.efficiency(c))
            high_e = max(high_e, self.efficiency(c))
        self.seed = start  # the same sample again
        worst = -1
        least = 1e300
        for _ in range(self.samples):
            c = self.draw()
            value = self.scaled(self.recency(c), low_r, high_r)
            value += self.alpha * self.scaled(self.efficiency(c), low_e, high_e)
            if value < least:
                worst = c
                least = value
        self.leave(worst)
        return worst

    def recency(self, c):
        return 1.0 / (1.0 + self.request - self.used[c])

    def efficiency(self, c):
        return self.recompute_seconds[c] / max(1, self.nbytes[c])

    def scaled(self, value, low, high):
        return (value - low) / (high - low) if high > low else 0.0

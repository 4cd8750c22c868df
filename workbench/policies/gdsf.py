"""Greedy-Dual-Size-Frequency (Cherkasova, 1998) with chunks of equal cost and size."""

from workbench.policies.base import policy

__all__ = ["Gdsf"]


@policy
class Gdsf:
    """Frequency on top of a floor that rises to the score of what was evicted last, so that old counts fade."""

    fields = dict(value="f8")
    scalars = dict(floor=0.0)

    def touch(self, c):
        self.value[c] = self.floor + 1.0 + self.hits[c]

    def score(self, c):
        return self.value[c]

    def on_evict(self, c):
        self.floor = self.value[c]

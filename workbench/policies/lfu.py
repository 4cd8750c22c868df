"""Least frequently used."""

from workbench.policies.base import policy

__all__ = ["Lfu"]


@policy
class Lfu:
    """Evicts the chunk with the fewest hits since it was inserted; of equals, the one used longest ago."""

    fields = dict(used="f8")

    def touch(self, c):
        self.used[c] = self.request

    def score(self, c):
        return self.hits[c] * 1e9 + self.used[c]

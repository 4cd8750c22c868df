"""PGDSF of RAGCache (Jin et al., 2024): greedy dual size frequency over a prefix tree."""

from workbench.policies.base import policy

__all__ = ["PrefixGdsf"]


@policy
class PrefixGdsf:
    """Uses times recompute time for each token, on top of a floor that rises with every eviction."""

    fields = dict(value="f8")
    scalars = dict(floor=0.0)

    def touch(self, c):
        self.value[c] = self.floor + (1.0 + self.hits[c]) * self.recompute_seconds[c] / max(1, self.tokens[c])

    def score(self, c):
        return self.value[c]

    def on_evict(self, c):
        self.floor = max(self.floor, self.value[c])  # a parent, cheaper to compute, may go after its children

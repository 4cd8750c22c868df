"""SGLang's SLRU: chunks with hits after those without (SGLang, mem_cache/evict_policy.py)."""

from workbench.policies.base import policy

__all__ = ["SglangSlru"]


@policy
class SglangSlru:
    """Evicts the leaf used longest ago among those with fewer than `protected_hits` uses, then among the others."""

    fields = dict(used="f8")
    scalars = dict(protected_hits=2)

    def touch(self, c):
        self.used[c] = self.request

    def score(self, c):
        return self.used[c] + (1e12 if self.hits[c] + 1 >= self.protected_hits else 0.0)

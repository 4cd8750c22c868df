"""Session-aware eviction, after the proposal of vLLM pull request 50422."""

from workbench.policies.base import policy

__all__ = ["SessionAware"]


@policy
class SessionAware:
    """Evicts the session that was silent longest, its deepest chunk first. Sessions are tenants.

    Where more tenants than table entries share one, the latest counts.
    """

    scalars = dict(most_depth=8192)
    table = dict(spoke="f8")
    table_min = 4096

    def touch(self, c):
        self.spoke[self.tenant[c] & (self.table_entries - 1)] = self.request

    def score(self, c):
        latest = self.spoke[self.tenant[c] & (self.table_entries - 1)]
        return latest * self.most_depth - min(self.depth[c], self.most_depth - 1)

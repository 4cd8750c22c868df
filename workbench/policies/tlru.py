"""Tail-optimised LRU, T-LRU (arXiv 2510.15152)."""

from workbench.policies.base import policy

__all__ = ["TailLru"]


@policy
class TailLru:
    """LRU that first evicts what a session's next turn can miss without exceeding its prefill threshold.

    A session that reached L chunks is expected to bring `next_chunks` more; all but `threshold_chunks` of that must be
    cached. A leaf deeper than this budget is safe to evict. Sessions are tenants; where more tenants than table entries
    share one, the longest counts.
    """

    fields = dict(used="f8")
    scalars = dict(next_chunks=4, threshold_chunks=64)
    table = dict(reach="i4")
    table_min = 4096

    def touch(self, c):
        self.used[c] = self.request
        session = self.tenant[c] & (self.table_entries - 1)
        if self.depth[c] + 1 > self.reach[session]:
            self.reach[session] = self.depth[c] + 1

    def score(self, c):
        session = self.tenant[c] & (self.table_entries - 1)
        budget = max(0, self.reach[session] + self.next_chunks - self.threshold_chunks)
        return self.used[c] + (0.0 if self.depth[c] >= budget else 1e12)

"""Session-aware eviction, after the proposal of vLLM pull request 50422."""

from workbench.policies.base import policy

__all__ = ["SessionAware"]


@policy
class SessionAware:
    """Chunks that one request stored form a group; the group used longest ago goes first, its deepest chunk first.

    The table remembers when a group was used; groups that share an entry share the later use.
    """

    fields = dict(group="i8")
    scalars = dict(most_depth=8192)
    table = dict(used="f8")
    table_min = 4096

    def touch(self, c):
        if self.group[c] == 0:
            self.group[c] = 1 + self.request
        self.used[self.group[c] & (self.table_entries - 1)] = self.request

    def score(self, c):
        latest = self.used[self.group[c] & (self.table_entries - 1)]
        return latest * self.most_depth - min(self.depth[c], self.most_depth - 1)

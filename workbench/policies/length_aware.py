"""LengthAwareCache of Mooncake (arXiv 2407.00079, table 1)."""

from workbench.policies.base import policy

__all__ = ["LengthAware"]


@policy
class LengthAware:
    """Like LFU, but of chunks used equally often the one latest in its prompt goes first."""

    def touch(self, c):
        pass

    def score(self, c):
        return (self.hits[c] + 1) * 1e6 - self.depth[c]

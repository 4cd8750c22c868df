"""The greedy optimum for prefixes: knows the future, so it runs in replay only."""

from workbench.policies.base import policy
from workbench.policies.belady import Belady

__all__ = ["Optimal"]


@policy
class Optimal(Belady):
    """Evicts the leaf whose next request is farthest and keeps a missing chunk out that is needed no sooner.

    The rule of PyPI's kvcache-simulator; greedy, not proven to be the best that any policy could do.
    """

    def admit(self, c, victim):
        return self.next_use[c] < self.next_use[victim]

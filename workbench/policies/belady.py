"""Belady's optimum for plain objects: knows the future, so it runs in replay only."""

from workbench.policies.base import policy

__all__ = ["Belady"]


@policy
class Belady:
    """Evicts what is used again last. Every missing chunk is stored."""

    def score(self, c):
        return -self.next_use[c]

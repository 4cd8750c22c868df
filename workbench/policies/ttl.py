"""Time to live, as providers of hosted models price it: minutes for most chunks, longer for the head of a prompt."""

from workbench.policies.base import policy

__all__ = ["Ttl"]


@policy
class Ttl:
    """Evicts what expires first. A use renews a chunk's time; nothing is dropped while there is room.

    The first `long_chunks` chunks of a prompt, such as a system prompt, live `long_seconds`.
    """

    fields = dict(expires="f8")
    scalars = dict(seconds=300.0, long_seconds=3600.0, long_chunks=4)

    def touch(self, c):
        self.expires[c] = self.now + (self.long_seconds if self.depth[c] < self.long_chunks else self.seconds)

    def score(self, c):
        return self.expires[c]

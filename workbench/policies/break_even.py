"""Recompute against load: a chunk is worth what loading it saves over computing it again.

Prefill time for a token grows with its position (Mooncake, FAST'25, equation 1), load time does not, so beyond some
position loading wins and before it recomputing does.
"""

from workbench.policies.base import policy

__all__ = ["BreakEven"]


@policy
class BreakEven:
    """Uses times seconds saved for each stored byte, on a rising floor; what saves nothing goes first."""

    fields = dict(value="f8")
    scalars = dict(floor=0.0)

    def touch(self, c):
        saved = self.recompute_seconds[c] - self.load_seconds[c]
        if saved > 0.0:
            self.value[c] = self.floor + (1.0 + self.hits[c]) * saved / max(1, self.nbytes[c])
        else:
            self.value[c] = -1.0

    def score(self, c):
        return self.value[c]

    def on_evict(self, c):
        self.floor = max(self.floor, self.value[c])

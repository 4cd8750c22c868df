"""First in, last out, as in SGLang's set."""

from workbench.policies.base import policy
from workbench.policies.mru import Mru

__all__ = ["Filo"]


@policy
class Filo(Mru):
    """Evicts the chunk inserted last; hits change nothing."""

    def on_hit(self, c):
        pass

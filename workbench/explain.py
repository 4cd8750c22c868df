"""Why a prompt hits as many tokens as it does: the answer to "I expected more"."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench.chunks import ChunkChain, common_tokens

if TYPE_CHECKING:
    from workbench.control import ControlPlane

__all__ = ["Explanation", "explain_chain"]


@dataclass(frozen=True)
class Explanation:
    """One prompt, looked at without changing anything. `str()` gives the sentence to read.

    Args:
        prompt_tokens: Tokens of the prompt.
        hit_tokens: What would be loaded now.
        hit_tiers: Tier of each hit chunk, in order.
        chunk_tokens: Tokens of a full chunk.
        shared_tokens: The longest prefix that it shares with one of the prompts served last under the same identity
            and scope, to the token.
        shared_chunk_tokens: What whole chunks of this prompt cover of that.
        miss_reason: Why the first chunk that does not hit does not; "" if all hit.
    """

    prompt_tokens: int
    hit_tokens: int
    hit_tiers: tuple[str, ...]
    chunk_tokens: int
    shared_tokens: int
    shared_chunk_tokens: int
    miss_reason: str

    @property
    def lost_to_chunk_size(self) -> int:
        """Shared tokens that neither fill a chunk nor hit as a part of one."""
        return max(0, self.shared_tokens - max(self.hit_tokens, self.shared_chunk_tokens))

    def __str__(self) -> str:
        parts = [f"{self.hit_tokens} of {self.prompt_tokens} tokens hit"]
        if not self.hit_tokens and self.prompt_tokens < self.chunk_tokens:
            parts.append(f"the prompt is shorter than a chunk of {self.chunk_tokens} tokens")
        elif self.miss_reason == "never stored":
            parts.append(self._divergence())
        elif self.miss_reason:
            parts.append(f"chunk {len(self.hit_tiers)}: {self.miss_reason}")
        elif tail := self.prompt_tokens - self.hit_tokens:
            parts.append(f"the last {tail} tokens do not fill a chunk")
        return "; ".join(parts)

    def _divergence(self) -> str:
        if self.shared_tokens == 0:
            return "diverges at token 0 from every prompt served lately"
        if self.hit_tokens >= self.shared_tokens:
            return "no prompt served lately shares more"
        if not self.shared_chunk_tokens:
            return f"shared {self.shared_tokens} tokens < chunk {self.chunk_tokens}"
        return f"shared {self.shared_tokens} tokens, {self.lost_to_chunk_size} lost to chunk size"


def explain_chain(control: "ControlPlane", chain: ChunkChain) -> Explanation:
    """What a control plane would answer for a chain of chunks, and why."""
    hit, tokens = control.lookup(chain), chain.tokens()
    levels = [control.index.level(control.index.find(chunk.key)) for chunk in control.covering(chain, 0, hit)]
    whole = chain.whole(hit)
    reason = control.miss_reason(chain[whole]) if whole < len(chain) else ""
    others = (other for root, other in control.recent_prompts if root == chain.root)
    shared = max((common_tokens(tokens, other) for other in others), default=0)
    tiers = tuple(control.tiers[level].name for level in levels)
    covered = chain.end(chain.whole(shared))
    return Explanation(len(tokens), hit, tiers, chain.chunk_tokens, shared, covered, reason)

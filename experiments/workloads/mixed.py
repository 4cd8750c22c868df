"""Several workloads in one stream, such as conversations among traffic that never repeats.

make_workload("mixed", tokenizer, shares={"chat": 0.6, "one_off": 0.4}, requests=50)
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.workloads import Request, Workload, make_workload, require_positive
from workbench.errors import InvalidInputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["mixed"]

_EQUAL_PARTS = {"chat": 0.5, "one_off": 0.5}


def mixed(
    tokenizer: "PreTrainedTokenizerBase",
    *,
    shares: Mapping[str, float] = _EQUAL_PARTS,
    requests: int = 32,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    seed: int = 0,
) -> Workload:
    """Make the workload: each part keeps its own order, the seed decides whose turn it is.

    Args:
        tokenizer: The served model's tokenizer.
        shares: Workload -> its share of the requests; they need not add up to 1.
        requests: How many in all.
        settings: Workload -> its settings.
        seed: Of the parts and of their order.

    Raises:
        InvalidInputError: A share of 0 or less, or a part that has fewer requests than its share asks for.
    """
    require_positive(requests=requests)
    if not shares or min(shares.values()) <= 0:
        raise InvalidInputError(f"shares are {dict(shares)}; each must be more than 0")
    counts = _counts(shares, requests)
    parts = [_part(tokenizer, name, count, seed, (settings or {}).get(name, {})) for name, count in counts.items()]
    turns = np.repeat(np.arange(len(parts)), [len(part.requests) for part in parts])
    np.random.default_rng(seed).shuffle(turns)
    waiting = [iter(_apart(part, number)) for number, part in enumerate(parts)]
    made = tuple(next(waiting[turn]) for turn in turns)
    size = f"{' + '.join(f'{count} {name}' for name, count in counts.items())} requests, shuffled"
    return Workload("mixed", made, seed, size, tuple(source for part in parts for source in part.sources))


def _counts(shares: Mapping[str, float], requests: int) -> dict[str, int]:
    """Whole numbers that add up to `requests`: the running sum is rounded, not each share."""
    ends = np.rint(np.cumsum(list(shares.values())) / sum(shares.values()) * requests).astype(int)
    return dict(zip(shares, np.diff(ends, prepend=0).tolist(), strict=True))


def _part(
    tokenizer: "PreTrainedTokenizerBase", name: str, count: int, seed: int, settings: Mapping[str, Any]
) -> Workload:
    part = make_workload(name, tokenizer, seed=seed, **settings)
    if len(part.requests) < count:
        raise InvalidInputError(
            f"the part {name} has {len(part.requests)} requests ({part.description}) where its share asks for {count}; "
            f"make it larger through settings={{{name!r}: ...}} or ask for fewer requests"
        )
    return replace(part, requests=part.requests[:count])


def _apart(part: Workload, number: int) -> list[Request]:
    """The part's requests under names and groups of their own."""
    return [
        replace(r, request_id=f"{part.name}-{r.request_id}", group=number * 1_000_000 + r.group, arrival_s=None)
        for r in part.requests
    ]

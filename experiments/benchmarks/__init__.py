"""Speed, always beside a peer and the physical limit in the same run. Each module prints JSON; `make bench` one table.

A benchmark is a module with `run(short: bool) -> dict` whose "rows" are made with `row`.
"""

from typing import Any

__all__ = ["row"]


def row(work: str, *, ours: Any, peer: Any = None, limit: Any = None, ratio: float | None = None,
        goal: str = "", met: bool | None = None) -> dict[str, Any]:  # fmt: skip
    """One line of the table: what was done, our figure, the peer's, the limit's, the ratio that counts and its goal."""
    return {"work": work, "ours": ours, "peer": peer, "limit": limit, "ratio": ratio, "goal": goal, "met": met}

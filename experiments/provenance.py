"""The line under a result: whether it was measured or simulated, on what, with which version, when."""

from importlib.metadata import PackageNotFoundError, version

from experiments.environment import describe_environment
from workbench.errors import InvalidInputError

__all__ = ["provenance"]

_BADGES = ("measured", "simulated")


def provenance(badge: str) -> str:
    """One line for a result cell.

    Args:
        badge: "measured" or "simulated".
    """
    if badge not in _BADGES:
        raise InvalidInputError(f"a result is {' or '.join(_BADGES)}, not {badge!r}")
    found = describe_environment()
    device = found["gpus"][0].partition(",")[0] if found["gpus"] else f"{found['cpu']}, {found['cores']} cores"
    commit = (
        f"commit {found['commit'][:7]}{' with changes' if found['dirty'] else ''}" if found["commit"] else "no commit"
    )
    return f"{badge} · {device} · kvworkbench {_own_version()}, {commit} · {found['time'][:10]}"


def _own_version() -> str:
    try:
        return version("kvworkbench")
    except PackageNotFoundError:
        return "from source"

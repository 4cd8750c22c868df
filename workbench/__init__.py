"""A KV-cache engine and the workbench around it."""

from importlib import import_module
from typing import TYPE_CHECKING

_HOMES = {
    "CacheConfig": "workbench.config",
    "CacheEngine": "workbench.engine",
    "CacheError": "workbench.errors",
    "Chunk": "workbench.chunks",
    "ChunkChain": "workbench.chunks",
    "ChunkScope": "workbench.chunks",
    "Event": "workbench.events",
    "Explanation": "workbench.explain",
    "Identity": "workbench.layout",
    "InvalidInputError": "workbench.errors",
    "KVLayout": "workbench.layout",
    "Recorder": "workbench.events",
    "policy": "workbench.policies",
}
__all__ = [
    "CacheConfig",
    "CacheEngine",
    "CacheError",
    "Chunk",
    "ChunkChain",
    "ChunkScope",
    "Event",
    "Explanation",
    "Identity",
    "InvalidInputError",
    "KVLayout",
    "Recorder",
    "policy",
]

if TYPE_CHECKING:
    from workbench.chunks import Chunk, ChunkChain, ChunkScope
    from workbench.config import CacheConfig
    from workbench.engine import CacheEngine
    from workbench.errors import CacheError, InvalidInputError
    from workbench.events import Event, Recorder
    from workbench.explain import Explanation
    from workbench.layout import Identity, KVLayout
    from workbench.policies import policy


def __getattr__(name: str):
    """Load a public name when it is first asked for: importing the package alone loads nothing heavy."""
    if name not in _HOMES:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

"""What a vLLM in a process of its own is started with, the same for an engine and for a server."""

import os
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.engine_process import engine_environment
from workbench.config import CacheConfig

__all__ = ["VllmProcess"]


@dataclass
class VllmProcess:
    """Settings of one vLLM, which `EngineProcess` and `ServerProcess` start in their ways.

    Args:
        model: Folder or Hugging Face name.
        cache: Settings of the KV-cache engine, or None without it.
        prefix_caching: vLLM's own prefix cache on.
        threads: Compute threads; 0 for all cores.
        vllm: Further arguments of `vllm.LLM`.
        kv_transfer: Another connector's `KVTransferConfig` fields.
        load_failure_policy: What vLLM does when a load of our engine fails: "recompute" or "fail".
        append_path: Searched for packages after the process's own: where another connector's package lies.
        log: File for what the process prints; a temporary one by default.

    Raises:
        InvalidInputError: Settings that cannot work; found before anything starts.
    """

    model: str
    cache: Mapping[str, Any] | None = None
    prefix_caching: bool = False
    threads: int = 0
    vllm: Mapping[str, Any] = field(default_factory=dict)
    kv_transfer: Mapping[str, Any] | None = None
    load_failure_policy: str = "recompute"
    append_path: str | None = None
    log: Path | None = None

    def __post_init__(self):
        self.start_seconds = 0.0
        self._process: subprocess.Popen | None = None
        if self.cache is not None:
            CacheConfig(**self.cache)
        if self.log is None:
            handle, name = tempfile.mkstemp(prefix="kvworkbench-vllm-", suffix=".log")
            os.close(handle)
            self.log = Path(name)

    def arguments(self) -> dict[str, Any]:
        """Arguments of vLLM by their names in `vllm.LLM`, as JSON can carry them."""
        found = {"model": str(self.model), "enforce_eager": True, "seed": 0, **self.vllm,
                 "enable_prefix_caching": self.prefix_caching}  # fmt: skip
        connector = self._connector()
        return found if connector is None else {**found, "kv_transfer_config": connector}

    def _connector(self) -> dict[str, Any] | None:
        if self.cache is None:
            return None if self.kv_transfer is None else dict(self.kv_transfer)
        return {
            "kv_connector": "WorkbenchConnector",
            "kv_connector_module_path": "workbench.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": self.load_failure_policy,
            "kv_connector_extra_config": {k: str(v) if isinstance(v, Path) else v for k, v in self.cache.items()},
        }

    def environment(self) -> dict[str, str]:
        """Environment of the process."""
        return engine_environment(self.threads, self.vllm)

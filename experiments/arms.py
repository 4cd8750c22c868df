"""Arms: the ways of serving the same requests, by name.

none, prefix_cache                       vLLM alone
memory, disk, redis, object_store        this engine, by the tier that holds the KV
offloading_cpu, offloading_file          vLLM's OffloadingConnector
example                                  vLLM's ExampleConnector: all of a prompt's whole blocks, or nothing
lmcache                                  LMCache 0.5 through its server

with ready(arm_by_name("redis"), folder) as arm:       # redis-server runs; arm.cache names its port
    EngineProcess(model, **arm.engine_options(folder))
"""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from string import Template
from typing import Any

from experiments.engine_process import UNTRACKED
from experiments.ports import reserved_port
from workbench.config import CacheConfig
from workbench.errors import CacheError, InvalidInputError, UnknownNameError

__all__ = ["ARMS", "LMCACHE_VARIABLE", "MORE_ARMS", "Arm", "ArmUnavailableError", "Companion", "arm_by_name",
           "hit_step_tokens", "ready"]  # fmt: skip

LMCACHE_VARIABLE = "KVWORKBENCH_LMCACHE_PYTHON"  # the interpreter of an environment in which LMCache is installed

_COMPANION_SECONDS = 120.0


class ArmUnavailableError(CacheError):
    """What an arm needs beside vLLM is not installed; the message says what."""


@dataclass(frozen=True)
class Companion:
    """A server that an arm needs.

    Args:
        missing: Says what is not installed, or "" if everything is there.
        start: folder -> context that holds the names which the arm's settings refer to.
    """

    missing: Callable[[], str]
    start: Callable[[Path], AbstractContextManager[dict[str, str]]]


@dataclass(frozen=True)
class Arm:
    """One way of serving the same requests.

    Texts in `cache` and `kv_transfer` may hold $folder and the names that the companion gives, such as $redis_port; $$
    is a dollar sign.

    Args:
        name: Short, for tables.
        label: For people.
        prefix_caching: vLLM's own prefix cache on.
        cache: Settings of the engine (`CacheConfig`), or None without it.
        disk: The engine has a disk tier in a folder of this run.
        restart: vLLM is stopped and started between the first questions and the repeated ones.
        cold_files: At that point, what the arm keeps in files is dropped from the operating system's cache, so that the
            disk is measured; without it, files of every arm come from memory.
        kv_transfer: Another connector's `KVTransferConfig` fields, for comparisons.
        vllm: Further arguments of `vllm.LLM` that this connector needs.
        deferred_stores: The connector stores a step's KV in the next step: an idle engine leaves it undone, and the
            next request would pay for it.
        companion: What runs beside vLLM.
        append_path: Searched for packages after the engine's own; filled in by `ready`.
    """

    name: str
    label: str
    prefix_caching: bool = False
    cache: Mapping[str, Any] | None = None
    disk: bool = False
    restart: bool = False
    cold_files: bool = False
    kv_transfer: Mapping[str, Any] | None = None
    vllm: Mapping[str, Any] = field(default_factory=dict)
    deferred_stores: bool = False
    companion: Companion | None = None
    append_path: str | None = None

    @property
    def missing(self) -> str:
        """What this arm needs and is not here, or ""."""
        return self.companion.missing() if self.companion else ""

    def tier_path(self, folder: Path) -> Path:
        """Where this arm keeps files during a run."""
        return Path(folder).absolute() / f"tier-{self.name}"

    def engine_options(self, folder: Path) -> dict[str, Any]:
        """Arguments of `EngineProcess` and `ServerProcess` that make this arm, once it is ready."""
        cache = None if self.cache is None else dict(self.cache)
        if cache is not None and self.disk:
            cache["disk_path"] = str(self.tier_path(folder))
        return {"cache": cache, "prefix_caching": self.prefix_caching, "kv_transfer": self.kv_transfer,
                "append_path": self.append_path}  # fmt: skip


def hit_step_tokens(cache: Mapping[str, Any] | None, block_size: int) -> int:
    """Tokens in the steps of which a prompt can be found again: one, those of a chunk, or without this engine those of
    vLLM's block."""
    if cache is None:
        return block_size
    config = CacheConfig(**cache)
    return 1 if config.partial_hits else int(config.chunk_tokens)


@contextmanager
def ready(arm: Arm, folder: Path) -> Iterator[Arm]:
    """Start what the arm needs, give it with every name in its settings filled in, and stop what was started.

    Raises:
        ArmUnavailableError: What it needs is not installed, or did not start.
        InvalidInputError: A setting holds a $name that there is not.
    """
    if arm.missing:
        raise ArmUnavailableError(f"arm {arm.name}: {arm.missing}")
    names = {"folder": str(arm.tier_path(folder))}
    if arm.companion is None:
        yield _filled(arm, names)
        return
    arm.tier_path(folder).mkdir(parents=True, exist_ok=True)
    with arm.companion.start(arm.tier_path(folder)) as more:
        yield _filled(arm, {**names, **more})


def arm_by_name(name: str | Arm) -> Arm:
    """The arm of that name. Raises UnknownNameError, with the names there are."""
    if isinstance(name, Arm):
        return name
    for arm in (*ARMS, *MORE_ARMS):
        if arm.name == name:
            return arm
    raise UnknownNameError("arm", name, [arm.name for arm in (*ARMS, *MORE_ARMS)])


def _filled(arm: Arm, names: Mapping[str, str]) -> Arm:
    def fill(value: Any) -> Any:
        if isinstance(value, str):
            try:
                return Template(value).substitute(names)
            except (KeyError, ValueError):
                known = ", ".join(f"${name}" for name in names)
                raise InvalidInputError(
                    f"arm {arm.name}: {value!r} may hold {known}, and $$ for a dollar sign"
                ) from None
        if isinstance(value, Mapping):
            return {name: fill(part) for name, part in value.items()}
        return [fill(part) for part in value] if isinstance(value, list) else value

    return replace(arm, cache=fill(arm.cache), kv_transfer=fill(arm.kv_transfer), append_path=names.get("append_path"))


# ---------------------------------------------------------------- companions


# Ends the command when this script's input is closed, which the death of the process that holds it does, too.
_LEASH = 'exec 3<&0; "$@" </dev/null & command=$!; (read -r _ <&3; kill $command) & wait $command'


@contextmanager
def _running(command: list[str], log: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen]:
    with log.open("ab") as output:
        process = subprocess.Popen(["/bin/sh", "-c", _LEASH, *command[:1], *command], stdin=subprocess.PIPE,
                                   stdout=output, stderr=output, env={**os.environ, **UNTRACKED, **environment},
                                   start_new_session=True)  # fmt: skip
    try:
        yield process
    finally:
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until(answers: Callable[[], bool], process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + _COMPANION_SECONDS
    while not answers():
        if process.poll() is not None or time.monotonic() > deadline:
            last = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
            raise ArmUnavailableError(f"{log.stem} did not start; the end of {log}:\n{last}")
        time.sleep(0.05)


def _redis_missing() -> str:
    return "" if shutil.which("redis-server") else "redis-server is not installed (apt install redis-server)"


@contextmanager
def _redis(folder: Path) -> Iterator[dict[str, str]]:
    import redis

    port, log = reserved_port(), folder / "redis.log"
    command = ["redis-server", "--port", str(port.number), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
               "--dir", str(folder)]  # fmt: skip
    client = redis.Redis(port=port.number, socket_timeout=1, socket_connect_timeout=1)

    def answers() -> bool:
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False

    with port, _running(command, log, {}) as process:
        _wait_until(answers, process, log)
        yield {"redis_port": str(port.number)}


def _lmcache_missing() -> str:
    python = os.environ.get(LMCACHE_VARIABLE, "")
    if Path(python).is_file():
        return ""
    return (
        f"LMCache has an environment of its own: set {LMCACHE_VARIABLE} to its python (pip install --no-deps lmcache)"
    )


@contextmanager
def _lmcache(folder: Path) -> Iterator[dict[str, str]]:
    from urllib.request import urlopen

    python, log = os.environ[LMCACHE_VARIABLE], folder / "lmcache.log"
    site = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], check=True,
                          capture_output=True, text=True).stdout.strip()  # fmt: skip
    port, http = reserved_port(), reserved_port()
    command = [python, "-c", "import sys; from lmcache.cli.main import main; sys.argv[0] = 'lmcache'; main()", "server",
               "--host", "localhost", "--port", str(port.number), "--http-host", "127.0.0.1", "--http-port",
               str(http.number), "--l1-size-gb", "1", "--eviction-policy", "LRU", "--chunk-size", "256",
               "--supported-transfer-mode", "auto"]  # fmt: skip

    def answers() -> bool:
        try:
            with urlopen(f"http://127.0.0.1:{http.number}/healthcheck", timeout=1) as answer:
                return answer.status == 200
        except OSError:
            return False

    with port, http, _running(command, log, {"LMCACHE_DISABLE_BANNER": "1", "PYTHONHASHSEED": "0"}) as process:
        _wait_until(answers, process, log)
        yield {"lmcache_port": str(port.number), "append_path": site}


# ---------------------------------------------------------------- the arms

ARMS = (
    Arm("none", "no reuse"),
    Arm("prefix_cache", "vLLM's prefix cache", prefix_caching=True),
    Arm("memory", "KV Workbench (memory)", cache={"memory_bytes": "1GiB"}),
    Arm("disk", "KV Workbench (disk, after a restart)", cache={"memory_bytes": 0}, disk=True, restart=True),
)

_BLOCK_128 = {"block_size": 128}  # the connectors' chunks are whole blocks; said aloud so that no default decides
_SPEC_MODULE = "experiments.benchmarks.vllm_offloading_cpu"

MORE_ARMS = (
    Arm("redis", "KV Workbench (Redis)", cache={"memory_bytes": 0, "redis_url": "redis://127.0.0.1:$redis_port/0"},
        companion=Companion(_redis_missing, _redis)),
    Arm("object_store", "KV Workbench (object store in local files)",
        cache={"memory_bytes": 0, "object_store_url": "file://$folder"}),
    Arm("offloading_cpu", "vLLM's OffloadingConnector (CPU)", vllm=_BLOCK_128, deferred_stores=True,
        kv_transfer={"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
            "spec_name": "HostOffloadingSpec", "spec_module_path": _SPEC_MODULE, "cpu_bytes_to_use": 1 << 30}}),
    Arm("offloading_file", "vLLM's OffloadingConnector (files)", vllm=_BLOCK_128, deferred_stores=True,
        kv_transfer={"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
            # so little memory that what is found again comes from the files
            "spec_name": "HostTieringSpec", "spec_module_path": _SPEC_MODULE, "cpu_bytes_to_use": 64 << 20,
            "secondary_tiers": [{"type": "fs", "root_dir": "$folder"}]}}),
    Arm("example", "vLLM's ExampleConnector", vllm=_BLOCK_128,
        kv_transfer={"kv_connector": "ExampleConnector", "kv_role": "kv_both",
                     "kv_connector_extra_config": {"shared_storage_path": "$folder"}}),
    Arm("lmcache", "LMCache (its server)", companion=Companion(_lmcache_missing, _lmcache), vllm=_BLOCK_128,
        kv_transfer={"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": "$lmcache_port",
            "lmcache.mp.mp_transfer_mode": "lmcache_driven"}}),
)  # fmt: skip

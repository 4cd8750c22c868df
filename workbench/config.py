"""Settings of an engine: one object, from keywords, a YAML file or the environment (KVWORKBENCH_...).

CacheConfig(memory_bytes="4GiB", disk_path="/var/cache/kv")
CacheConfig.from_yaml("cache.yaml", chunk_tokens=512)
CacheConfig(backend="redis", redis_host="10.0.0.5", chunk_size=256, max_cache_size_gb=50)    # familiar names
"""

from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from pydantic import ByteSize, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, YamlConfigSettingsSource
from yaml import YAMLError

from workbench.errors import InvalidInputError, UnknownNameError

__all__ = ["CacheConfig"]


class CacheConfig(BaseSettings):
    """What an engine is made of. Sizes take a number of bytes or a text such as "4GiB".

    Precedence: keyword, then YAML file, then environment variable (KVWORKBENCH_CHUNK_TOKENS=512), then the default.

    Raises:
        InvalidInputError: An unknown setting (the nearest known one is named) or a value that does not fit.
    """

    model_config = SettingsConfigDict(env_prefix="KVWORKBENCH_", extra="forbid", frozen=True)

    chunk_tokens: PositiveInt = 256  # tokens of a chunk, a multiple of the serving engine's block size
    memory_bytes: ByteSize = ByteSize(1 << 30)  # budget of the memory tier; 0 for none
    disk_path: Path | None = None  # directory of the disk tier; none without
    disk_bytes: ByteSize = ByteSize(16 << 30)  # the most that the disk tier may take
    disk_survey_seconds: PositiveFloat = 30.0  # how often to look what other processes brought there and took
    disk_durable: bool = False  # sync each file before it gets its name
    redis_url: str | None = None  # "redis://host:6379/0", "rediss://" with TLS; none without
    redis_bytes: ByteSize = ByteSize(64 << 30)  # the most that this engine counts on there
    redis_timeout_seconds: float = 0.25  # of silence, after which the server counts as away
    redis_password_file: Path | None = None  # or the environment variable KVWORKBENCH_REDIS_PASSWORD
    redis_ca_file: Path | None = None  # certificate authority for rediss://
    redis_expire_seconds: int = 0  # of a record; 0 for never
    object_store_url: str | None = None  # "s3://bucket/prefix", "gs://", "az://", "file:///"; none without
    object_store_bytes: ByteSize = ByteSize(1 << 40)  # the most that this engine counts on there
    object_store_timeout_seconds: float = 0.25
    object_store_options: dict[str, str] = {}  # of the store, as obstore names them; credentials from the environment
    object_store_client_options: dict[str, str] = {}
    policy: str = "lru"  # eviction order of the memory tier: a name, "file.py:Class" or "module:Class"
    disk_policy: str = "lru"  # the same for the disk tier
    redis_policy: str = "lru"
    object_store_policy: str = "lru"
    codec: str = "raw"  # of the tiers below memory: a name of `workbench.codecs`, or as in "int4(group=32)"
    memory_codec: str = "raw"  # of the memory tier: encoded when stored, decoded by each load; nothing rises into it
    boundary_tokens: tuple[NonNegativeInt, ...] = ()  # ids that end a sentence or turn: chunks end behind them, too
    min_chunk_tokens: NonNegativeInt = 0  # of a chunk that ends at one, whole blocks; 0 for a quarter of a full chunk
    partial_hits: bool = True  # a hit may end within a stored chunk, at any token
    store_partial: bool | None = None  # store the tail that does not fill a chunk, too; by default as `partial_hits`
    write: Literal["through", "back"] = "through"  # to slower tiers at once, or when evicted
    store_decoded: bool = True  # store chunks that fill up while the answer is generated, too
    staging_bytes: ByteSize = ByteSize(256 << 20)  # chunks under way to slower tiers without a place in memory
    load_deadline_seconds: PositiveFloat = 5.0  # a chunk that a slower tier does not deliver in time is a miss
    deadline_seconds: PositiveFloat = 60.0  # a store or load that nobody answers is taken back after so long
    request_deadline_seconds: PositiveFloat = 600.0  # a request without a sign of life is over after so long
    verify: bool = False  # keep digests and compare after every load
    events_path: Path | None = None  # JSON lines of every event; none without

    def __init__(self, **settings: Any):
        if "backend" in settings:
            settings = _from_familiar_names(settings)
        if unknown := sorted(set(settings) - set(type(self).model_fields)):
            near = get_close_matches(unknown[0], type(self).model_fields, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise InvalidInputError(
                f"unknown setting {unknown[0]!r}; {hint}there are {', '.join(type(self).model_fields)}"
            )
        try:
            super().__init__(**settings)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"])) or "settings"
            raise InvalidInputError(f"{name} is {first['input']!r}: {first['msg']}") from None

    @property
    def stores_tails(self) -> bool:
        """Whether the tail that does not fill a chunk is stored."""
        return self.partial_hits if self.store_partial is None else self.store_partial

    @classmethod
    def from_yaml(cls, path: str | Path, **settings: Any) -> "CacheConfig":
        """Settings from a YAML file; keywords go before it.

        Raises:
            InvalidInputError: The file is not there, is no YAML, or holds anything but settings.
        """
        try:
            found = YamlConfigSettingsSource(cls, yaml_file=_existing(path))()
        except (OSError, YAMLError, ValueError) as error:
            raise InvalidInputError(f"{path} is not a file of settings: {error}") from None
        return cls(**{**found, **settings})


def _existing(path: str | Path) -> Path:
    if not Path(path).is_file():
        raise InvalidInputError(f"{path} is not a file")
    return Path(path)


# What users of other caches write: backend -> (settings it always means, {their name: ours}).
_FAMILIAR = {
    "memory": ({}, {"max_cache_size_gb": "memory_bytes"}),
    "disk": ({"memory_bytes": 0}, {"max_cache_size_gb": "disk_bytes", "disk_dir": "disk_path", "path": "disk_path"}),
    "redis": ({"memory_bytes": 0}, {"max_cache_size_gb": "redis_bytes"}),
    "s3": ({"memory_bytes": 0}, {"max_cache_size_gb": "object_store_bytes", "url": "object_store_url"}),
}
_TIERS = {"s3": "object_store"}


def _from_familiar_names(settings: dict[str, Any]) -> dict[str, Any]:
    """`backend`, `chunk_size`, `max_cache_size_gb`, `redis_host`, `redis_port` and the like in our own terms."""
    backend = settings["backend"]
    if backend not in _FAMILIAR:
        raise UnknownNameError("backend", backend, _FAMILIAR)
    fixed, names = _FAMILIAR[backend]
    order = "policy" if backend == "memory" else f"{_TIERS.get(backend, backend)}_policy"
    names = {"chunk_size": "chunk_tokens", "eviction_policy": order, **names}
    ours = dict(fixed)
    for name, value in settings.items():
        if name == "max_cache_size_gb":
            value = int(float(value) * 2**30)
        if name not in ("backend", "redis_host", "redis_port"):
            ours[names.get(name, name)] = value
    if backend == "redis" and "redis_url" not in ours:
        ours["redis_url"] = f"redis://{settings.get('redis_host', '127.0.0.1')}:{settings.get('redis_port', 6379)}/0"
    return ours

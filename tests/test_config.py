import pytest
from oracle import IDENTITY

from workbench.config import CacheConfig
from workbench.engine import CacheEngine
from workbench.errors import InvalidInputError


def test_defaults_and_keywords():
    config = CacheConfig(memory_bytes="2GiB", chunk_tokens=64)
    assert (config.memory_bytes, config.chunk_tokens, config.disk_path) == (2 << 30, 64, None)
    assert CacheConfig().write == "through"


def test_keyword_goes_before_environment_before_default(monkeypatch):
    monkeypatch.setenv("KVWORKBENCH_CHUNK_TOKENS", "512")
    monkeypatch.setenv("KVWORKBENCH_MEMORY_BYTES", "3MiB")
    monkeypatch.setenv("KVWORKBENCH_DISK_PATH", "/somewhere")
    config = CacheConfig(chunk_tokens=32)
    assert (config.chunk_tokens, config.memory_bytes, str(config.disk_path)) == (32, 3 << 20, "/somewhere")


def test_variables_of_other_parts_do_not_disturb(monkeypatch):
    monkeypatch.setenv("KVWORKBENCH_DATA", "/data")
    monkeypatch.setenv("KVWORKBENCH_POLICIES", "/policies")
    CacheConfig()


def test_an_unknown_setting_names_the_nearest():
    with pytest.raises(InvalidInputError, match="did you mean 'chunk_tokens'"):
        CacheConfig(chunk_token=64)
    with pytest.raises(InvalidInputError, match="there are chunk_tokens, "):
        CacheConfig(qqq=1)


@pytest.mark.parametrize("wrong", [
    {"chunk_tokens": "many"}, {"memory_bytes": "2 elephants"}, {"write": "sideways"}, {"disk_durable": "perhaps"},
    {"memory_bytes": -1}, {"disk_bytes": -5}, {"staging_bytes": -1}, {"chunk_tokens": 0}, {"chunk_tokens": 2.5},
])  # fmt: skip
def test_a_value_that_does_not_fit_is_named(wrong):
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        CacheConfig(**wrong)


def test_a_wrong_environment_variable_is_named(monkeypatch):
    monkeypatch.setenv("KVWORKBENCH_MEMORY_BYTES", "lots")
    with pytest.raises(InvalidInputError, match="memory_bytes"):
        CacheConfig()


def test_settings_do_not_change_afterwards():
    with pytest.raises(Exception, match="frozen"):
        CacheConfig().chunk_tokens = 5


def test_the_engine_says_what_it_cannot_be_built_of(tmp_path):
    chunk = IDENTITY.layout.chunk_nbytes
    for settings, words in [
        ({"memory_bytes": chunk - 1}, f"takes {chunk} bytes"),
        ({"memory_bytes": 0}, "no tier"),
        ({"memory_bytes": chunk, "chunk_tokens": 16}, "must agree"),
        ({"memory_bytes": 0, "disk_path": tmp_path, "disk_bytes": chunk}, "disk_bytes"),
        ({"memory_bytes": chunk, "policy": "lruu"}, "lru"),
        ({"memory_bytes": chunk, "pollicy": "lru"}, "policy"),
    ]:
        with pytest.raises(InvalidInputError, match=words):
            CacheEngine(IDENTITY, **settings)


def test_a_budget_beyond_the_machine_is_refused_before_it_is_taken():
    from workbench.errors import CapacityError

    with pytest.raises(CapacityError, match="GiB are free"):
        CacheEngine(IDENTITY, memory_bytes="100TiB")


def test_yaml_goes_before_environment_and_after_keywords(tmp_path, monkeypatch):
    monkeypatch.setenv("KVWORKBENCH_CHUNK_TOKENS", "1024")
    file = tmp_path / "cache.yaml"
    file.write_text("chunk_tokens: 128\nmemory_bytes: 2GiB\ndisk_path: /somewhere\n")
    config = CacheConfig.from_yaml(file, memory_bytes="3GiB")
    assert (config.chunk_tokens, config.memory_bytes, str(config.disk_path)) == (128, 3 << 30, "/somewhere")
    file.write_text("chunk_token: 128\n")
    with pytest.raises(InvalidInputError, match="did you mean 'chunk_tokens'"):
        CacheConfig.from_yaml(file)
    file.write_text("chunk_tokens: [")
    with pytest.raises(InvalidInputError, match="not a file of settings"):
        CacheConfig.from_yaml(file)
    with pytest.raises(InvalidInputError, match="is not a file"):
        CacheConfig.from_yaml(tmp_path / "absent.yaml")


def test_familiar_names():
    config = CacheConfig(backend="redis", redis_host="cache", chunk_size=128, max_cache_size_gb=1.5)
    assert (config.redis_url, config.chunk_tokens, config.redis_bytes) == ("redis://cache:6379/0", 128, 3 << 29)
    assert config.memory_bytes == 0
    config = CacheConfig(backend="memory", max_cache_size_gb=2, eviction_policy="fifo")
    assert (config.memory_bytes, config.policy) == (2 << 30, "fifo")
    assert CacheConfig(backend="disk", disk_dir="/d").disk_path.name == "d"
    assert CacheConfig(backend="s3", url="s3://b", eviction_policy="fifo").object_store_policy == "fifo"
    with pytest.raises(InvalidInputError, match="there are disk, memory, redis, s3"):
        CacheConfig(backend="tape")
    with pytest.raises(InvalidInputError, match="unknown setting 'redis_hots'"):
        CacheConfig(backend="redis", redis_hots="x")

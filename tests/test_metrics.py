"""Prometheus metrics: named and typed by the ecosystem's conventions, and equal to what the engine's events say."""

import re

import pytest
from oracle import IDENTITY, Pages, chain_of
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from workbench.engine import CacheEngine

CHUNK = IDENTITY.layout.chunk_nbytes


def store(engine, tokens) -> None:
    pages = Pages(16)
    pages.compute(chain_of(tokens), range(16))
    engine.store(tokens, pages.table, blocks=range(16))


def retrieve(engine, tokens) -> int:
    return engine.retrieve(tokens, Pages(16).table, blocks=range(16))


@pytest.fixture
def engine(tmp_path):
    """Two hits in memory and two on disk of eight looked-up chunks; one record damaged."""
    with CacheEngine(IDENTITY, memory_bytes=2 * CHUNK, disk_path=tmp_path) as engine:
        store(engine, range(32))
        engine.flush()
        assert retrieve(engine, range(32)) == 32
        assert retrieve(engine, range(100, 132)) == 0
        store(engine, range(200, 216))
        engine.flush()
        path = tmp_path / (name := chain_of(range(32))[3].key.hex())[:2] / f"{name}.kv"
        path.write_bytes(path.read_bytes()[:-1] + b"\0")
        assert retrieve(engine, range(32)) == 24
        yield engine


def samples(engine) -> dict[tuple[str, ...], float]:
    """(name, label values in the order of their labels) -> value, as a Prometheus server would read it."""
    families = text_string_to_metric_families(str(engine.metrics()))
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_the_figures_are_those_of_the_engine(engine):
    seen, stats = samples(engine), engine.stats()
    assert seen["kvworkbench_lookup_tokens_total",] == stats["looked_up_tokens"] == 96
    assert seen["kvworkbench_reused_tokens_total",] == stats["hit_tokens"] == 64
    assert seen["kvworkbench_requests_total",] == 3 and seen["kvworkbench_requests_with_hit_total",] == 2
    assert seen["kvworkbench_hit_ratio", "tokens"] == pytest.approx(stats["hit_rate"]) == pytest.approx(64 / 96)
    assert seen["kvworkbench_hit_ratio", "chunks"] == pytest.approx(stats["hit_rate_by_chunks"])
    assert seen["kvworkbench_hit_ratio", "requests"] == pytest.approx(stats["hit_rate_by_requests"])
    hit = {name[1]: value for name, value in seen.items() if name[0] == "kvworkbench_hit_tokens_total"}
    assert sum(hit.values()) == 64 and set(hit) == {"memory", "disk"}
    assert seen["kvworkbench_miss_chunks_total", "never stored"] == 4
    assert seen["kvworkbench_corrupt_total", "corrupt", "disk"] == 1
    assert seen["kvworkbench_load_failures_total", "corrupt", "disk"] == 1
    for tier in engine.tiers():
        assert seen["kvworkbench_tier_used_bytes", tier.name] == tier.used_bytes
        assert seen["kvworkbench_tier_capacity_bytes", tier.name] == tier.capacity_bytes
        assert seen["kvworkbench_tier_holds", tier.name] == 0
    stored = [e.nbytes for e in engine.record.events if e.kind == "store" and e.tier == "memory"]
    assert seen["kvworkbench_stored_bytes_total", "memory"] == sum(stored) == 4 * CHUNK
    assert seen["kvworkbench_breaker_open", "disk"] == seen["kvworkbench_breaker_trips_total", "disk"] == 0
    assert ("kvworkbench_breaker_open", "memory") not in seen


def test_histograms_count_each_good_load_once(engine):
    seen = samples(engine)
    for tier in ("memory", "disk"):
        loads = [e for e in engine.record.events if e.kind == "load" and e.tier == tier and not e.reason]
        assert seen["kvworkbench_load_seconds_count", tier] == len(loads) > 0
        assert seen["kvworkbench_load_seconds_sum", tier] == pytest.approx(sum(e.seconds for e in loads))
        steps = [value for name, value in seen.items() if name[0] == "kvworkbench_load_seconds_bucket" and tier in name]
        assert steps == sorted(steps) and steps[-1] == len(loads)


def test_names_units_and_help_follow_the_conventions(engine):
    registry = CollectorRegistry()
    registry.register(engine.metrics())
    names = set()
    for family in registry.collect():
        assert re.fullmatch(r"kvworkbench_[a-z0-9_]+", family.name) and family.name not in names
        names.add(family.name)
        assert family.documentation.endswith(".")
        assert not family.name.endswith(("_ms", "_mb", "_gib", "_count", "_info"))
        if family.type == "histogram":
            assert family.name.endswith("_seconds")
        for sample in family.samples:
            assert (family.type == "counter") == sample.name.endswith("_total")
    assert {"kvworkbench_lookup_tokens", "kvworkbench_load_seconds", "kvworkbench_dropped"} <= names


def test_no_sample_is_no_rate_and_a_closed_engine_still_tells(tmp_path):
    engine = CacheEngine(IDENTITY, memory_bytes="1MiB")
    assert not [name for name in samples(engine) if name[0] == "kvworkbench_hit_ratio"]
    store(engine, range(8))
    engine.close()
    assert samples(engine)["kvworkbench_stored_bytes_total", "memory"] == CHUNK


def test_events_to_parquet(engine, tmp_path):
    import polars

    engine.record.to_parquet(tmp_path / "events.parquet")
    read = polars.read_parquet(tmp_path / "events.parquet")
    assert read.equals(engine.record.frame()) and len(read) == len(engine.record.events)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_loads_and_stores_as_spans(tmp_path):
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from workbench.events import Recorder
    from workbench.spans import EventSpans

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    record = Recorder(sink=EventSpans(provider.get_tracer("test")))
    with CacheEngine(IDENTITY, memory_bytes=0, disk_path=tmp_path, record=record) as engine:
        store(engine, range(16))
        engine.flush()
        next(tmp_path.rglob("*.kv")).unlink()
        retrieve(engine, range(16))
    moves = [event for event in record.events if event.kind in ("load", "store")]
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == [f"kvworkbench.{event.kind}" for event in moves]
    for span, event in zip(spans, moves, strict=True):
        assert span.attributes["kvworkbench.chunk"] == event.key
        assert (span.end_time - span.start_time) / 1e9 == pytest.approx(event.seconds, abs=1e-6)
        assert span.status.is_ok == (not event.reason)
    assert {span.status.description for span in spans} == {None, "absent"}

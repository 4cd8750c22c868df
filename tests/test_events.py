import json

import pytest
from oracle import IDENTITY, Pages, chain_of

from workbench.engine import CacheEngine
from workbench.events import EVENT_KINDS, Event, Recorder, events_frame


def test_no_sample_is_no_rate():
    rates = Recorder().totals.hit_rates()
    assert rates == {"hit_rate": None, "hit_rate_by_chunks": None, "hit_rate_by_requests": None}


def test_a_rate_of_nothing_is_zero_where_something_was_looked_up():
    record = Recorder()
    record("lookup", tokens=100)
    record("reuse", tokens=0)
    assert record.totals.hit_rates() == {"hit_rate": 0.0, "hit_rate_by_chunks": None, "hit_rate_by_requests": 0.0}


def test_the_three_hit_rates_differ_and_each_is_right():
    """Stored: 16 tokens (2 chunks). Asked: 20 tokens with 16 shared, then 30 tokens with none shared."""
    pages, tokens = Pages(16), list(range(16))
    with CacheEngine(IDENTITY, memory_bytes="1MiB") as engine:
        assert engine.stats()["hit_rate"] is None
        pages.compute(chain_of(tokens), range(16))
        engine.store(tokens, pages.table, blocks=range(16))
        assert engine.stats()["hit_rate"] is None, "a store is no lookup"
        engine.lookup(tokens)
        assert engine.stats()["lookups"] == 0, "to look is not to admit"
        assert engine.retrieve([*tokens, 1, 2, 3, 4], pages.table, blocks=range(16)) == 16
        assert engine.retrieve(range(100, 130), pages.table, blocks=range(16)) == 0
        stats = engine.stats()
    assert stats["hit_rate"] == pytest.approx(16 / 50)
    assert stats["hit_rate_by_chunks"] == pytest.approx(2 / (2 + 3))
    assert stats["hit_rate_by_requests"] == 1 / 2
    assert (stats["lookups"], stats["looked_up_tokens"], stats["hit_tokens"]) == (2, 50, 16)


def test_failures_add_no_bytes():
    record = Recorder()
    record("load", tier="disk", nbytes=10, seconds=1.0)
    record("load", tier="disk", nbytes=99, seconds=9.0, reason="corrupt")
    totals = record.totals
    assert totals.nbytes["load", "disk"] == 10 and totals.seconds["load", "disk"] == 1.0
    assert totals.failures("load") == {"corrupt": 1} and totals.count("load") == 2


def test_totals_outlive_the_events_that_are_kept():
    record = Recorder(keep=10)
    for _ in range(100):
        record("lookup", tokens=1)
    assert len(record.events) == 10 and record.totals.count("lookup") == 100


def test_totals_are_the_sum_of_the_events():
    pages, record = Pages(64), Recorder()
    with CacheEngine(IDENTITY, memory_bytes=3 * IDENTITY.layout.chunk_nbytes, record=record) as engine:
        for start in range(0, 160, 8):
            tokens = [*range(8), *range(start, start + 16)]
            engine.retrieve(tokens, pages.table, blocks=range(16))
            pages.compute(chain_of(tokens), range(16))
            engine.store(tokens, pages.table, blocks=range(16))
    again = Recorder().totals
    for event in record.events:
        again.add(event)
    assert again == record.totals
    assert {e.kind for e in record.events} <= set(EVENT_KINDS)
    assert {"lookup", "reuse", "hit", "miss", "load", "store", "dedup", "evict", "drop"} <= {
        e.kind for e in record.events
    }


def test_what_leaves_the_last_tier_is_dropped(tmp_path):
    pages, record = Pages(64), Recorder()
    settings = {"memory_bytes": IDENTITY.layout.chunk_nbytes, "disk_path": tmp_path, "disk_bytes": "16KiB"}
    with CacheEngine(IDENTITY, record=record, **settings) as engine:
        for start in range(0, 80, 8):
            pages.compute(chain_of(range(start, start + 8)), range(2))
            engine.store(range(start, start + 8), pages.table, blocks=range(2))
            engine.flush()
    evictions = [e.tier for e in record.events if e.kind == "evict"]
    drops = [e for e in record.events if e.kind == "drop"]
    assert evictions.count("memory") == 9 and evictions.count("disk") == len(drops) > 0
    assert {e.reason for e in drops} == {"evicted"}


def test_a_frame_has_its_schema_empty_or_not():
    empty, record = events_frame([]), Recorder()
    record("lookup", tokens=5)
    full = record.frame()
    assert empty.schema == full.schema and list(empty.columns) == list(Event._fields)
    assert len(empty) == 0 and full["tokens"].to_list() == [5]


def test_events_path_gets_a_line_an_event(tmp_path):
    path, pages = tmp_path / "runs" / "events.jsonl", Pages(8)
    with CacheEngine(IDENTITY, memory_bytes="1MiB", events_path=path) as engine:
        engine.store(range(8), pages.table, blocks=range(2))
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [Event(*line) for line in lines] == list(engine.record.events) and lines

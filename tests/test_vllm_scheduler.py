"""The connector's halves without an engine around them: vLLM's calls in vLLM's order, pages filled by the oracle."""

import itertools
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from oracle import Pages, audit, payload

pytest.importorskip("vllm", reason="vLLM is not installed")

import workbench.connectors.vllm as connector
from workbench.config import CacheConfig
from workbench.connectors.vllm_metrics import TransferMetrics, TransferStats
from workbench.engine import build_data
from workbench.layout import Identity, KVLayout
from workbench.orders import Done

pytestmark = pytest.mark.usefixtures("whole_chunks")

BLOCK, FULL, END = 4, 16, 99
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_size=16, block_size=BLOCK, chunk_tokens=FULL)


class Engine:
    """One request at a time: look up, load, compute, store, report."""

    def __init__(self, monkeypatch, **settings):
        monkeypatch.setattr(connector, "identity_of", lambda *_: Identity(layout=LAYOUT, weights="w"))
        config = CacheConfig(chunk_tokens=FULL, **{"memory_bytes": "1MiB", **settings})
        ranks = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))
        self.scheduler = connector._Scheduler(ranks, None, config)
        self.control = self.scheduler.control
        self.data = build_data(self.scheduler.identity, config)
        self.pages, self.names = Pages(64, LAYOUT), itertools.count()
        self.data.attach(self.pages.table)

    def ask(self, tokens, answer=(), salt=None) -> int:
        """Tokens that were loaded; what was loaded is compared with the oracle to the byte."""
        request = SimpleNamespace(request_id=f"r{next(self.names)}", all_token_ids=list(tokens), cache_salt=salt,
                                  num_tokens=len(tokens), num_prompt_tokens=len(tokens), lora_request=None)  # fmt: skip
        hit = self.scheduler.matched_tokens(request, 0)
        blocks = list(range(-(-(len(tokens) + len(answer)) // BLOCK)))
        self.pages.spoil(np.random.default_rng(0))
        self.scheduler.allocated(request, blocks, hit)
        self._step(request, blocks, hit, len(tokens) - hit, first=True)
        for token in answer:
            request.all_token_ids.append(token)
            request.num_tokens += 1
            self._step(request, blocks, request.num_tokens - 1, 1, first=False)
        self.scheduler.finished(request)
        self.data.flush()
        self.scheduler.reported(self.data.take_report())
        return hit

    def _step(self, request, blocks, computed, more, first):
        name = request.request_id
        new = [SimpleNamespace(req_id=name, block_ids=(blocks,), num_computed_tokens=computed)] if first else []
        old = ([], [], []) if first else ([name], [None], [computed])
        cached = SimpleNamespace(req_ids=old[0], new_block_ids=old[1], num_computed_tokens=old[2], resumed_req_ids=())
        orders = self.scheduler.step(SimpleNamespace(scheduled_new_reqs=new, scheduled_cached_reqs=cached,
                                                     num_scheduled_tokens={name: more}))  # fmt: skip
        self.data.begin_step()
        self.data.run(orders.loads)
        assert not self.data.take_bad_blocks()
        for order in orders.loads:
            for layer, part in enumerate(payload(order.chunk.key, LAYOUT)):
                for place, block in enumerate(order.blocks):
                    assert block < 0 or np.array_equal(self.pages.arrays[layer][block], part[place]), "wrong KV"
        for order in orders.stores:  # the forward pass: the KV of what is about to be stored
            for layer, part in enumerate(payload(order.chunk.key, LAYOUT)):
                self.pages.arrays[layer][list(order.blocks)] = part[: len(order.blocks)]
        self.data.run(orders.stores)
        self.scheduler.reported(self.data.take_report())

    def close(self):
        audit(self.control)
        self.data.close()
        self.scheduler.close()


@pytest.fixture
def make(monkeypatch):
    made = []

    def start(**settings):
        made.append(Engine(monkeypatch, **settings))
        return made[-1]

    yield start
    for engine in made:
        engine.close()


TURNS = [[*range(100 * n, 100 * n + 17), END] for n in range(4)]  # 18 tokens each
PROMPTS = [[token for turn in TURNS[: n + 1] for token in turn] for n in range(4)]  # 18, 36, 54, 72 tokens


def test_fixed_chunks(make):
    engine = make()
    assert [engine.ask(prompt) for prompt in PROMPTS] == [0, 16, 32, 48]


BY_TURNS = {"boundary_tokens": (END,), "min_chunk_tokens": BLOCK}


@pytest.mark.parametrize("settings, hits", [(BY_TURNS, [0, 16, 36, 52]), ({"store_partial": True}, [0, 18, 36, 54])])
def test_each_turn_is_hit_to_the_end_of_the_one_before(make, settings, hits, tmp_path):
    engine = make(disk_path=tmp_path, **settings)
    assert [engine.ask(prompt) for prompt in PROMPTS] == hits
    assert engine.ask(PROMPTS[1]) == 35, "one token is left to compute"
    assert engine.ask([*PROMPTS[1], 5, 6]) == 36
    assert engine.ask([*PROMPTS[1][:34], 5, 6, 7]) == 32, "what differs within a chunk is not served"
    assert engine.ask(PROMPTS[2], salt="other") == 0
    engine.close()
    again = make(disk_path=tmp_path, memory_bytes=0, **settings)
    assert again.ask(PROMPTS[3]) == 71, "a restart finds short chunks, too"


def test_a_hit_may_end_at_any_token(make):
    engine = make(store_partial=True, partial_hits=True)
    prompt = list(range(1000, 1200))
    assert engine.ask(prompt) == 0
    assert engine.ask(prompt) == 199
    assert [engine.ask([*prompt[:stop], 5, 6]) for stop in (190, 47, 33, 7)] == [190, 47, 32, 7]


def test_answers_are_stored_as_they_grow(make):
    """A prompt's tail when it is computed; of the answer every half chunk."""
    engine = make(store_partial=True)
    prompt, answer = list(range(22)), list(range(200, 204))
    assert engine.ask(prompt, answer) == 0
    assert engine.ask([*prompt, 1, 2, 3]) == 22
    assert engine.ask([*prompt, *answer, 1]) == 24
    engine = make(store_partial=True)
    engine.ask(prompt, list(range(200, 220)))
    assert engine.ask([*prompt, *range(200, 220), 1]) == 40


def test_a_codec_is_given_whole_blocks_alone(make, tmp_path):
    """What lies in a block behind a tail's last token belongs to somebody else; no scale may come from it."""
    engine = make(store_partial=True, disk_path=tmp_path, codec="lossless")
    assert engine.ask(list(range(22))) == 0 and engine.ask(list(range(22))) == 20


def test_the_figures_that_reach_vllm(make):
    engine = make()
    for prompt in PROMPTS[:2]:
        engine.ask(prompt)
    stats = engine.scheduler.take_stats()
    assert stats.data["counters"]["lookup_tokens"] == {"": 54} and stats.data["counters"]["hit_tokens"] == {
        "memory": 16
    }
    assert stats.data["gauges"]["tier_used_bytes"] == {"memory": 2 * LAYOUT.chunk_nbytes}
    assert engine.scheduler.take_stats() is None, "told once"
    engine.ask(PROMPTS[1])
    worker = TransferStats()
    worker.note(Done("load", "r", 0, b"k", 0, 10, 0.1, ""))
    both = worker.aggregate(stats).aggregate(engine.scheduler.take_stats())
    assert both.data["counters"]["reused_tokens"] == {"": 16 + 32} and both.data["load"]["nbytes"] == 10
    assert both.reduce()["reused_tokens"] == 48 and not both.is_empty()

    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

    registry = CollectorRegistry()
    kinds = {kind: partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)}
    metrics = TransferMetrics(SimpleNamespace(kv_transfer_config=None), kinds, ["model_name"], {0: ["m"]})
    metrics.observe(both.data)
    text = generate_latest(registry).decode()
    assert 'vllm:kvworkbench_hit_tokens_total{model_name="m",tier="memory"} 48.0' in text
    assert 'vllm:kvworkbench_tier_used_bytes{model_name="m",tier="memory"}' in text
    assert 'vllm:kvworkbench_lookup_tokens_total{model_name="m"}' in text


def test_an_order_that_is_lost_is_taken_back(make):
    engine = make(deadline_seconds=0.05)
    request = SimpleNamespace(request_id="x", all_token_ids=list(range(16)), cache_salt=None, num_tokens=16,
                              num_prompt_tokens=16, lora_request=None)  # fmt: skip
    engine.scheduler.matched_tokens(request, 0)
    engine.scheduler.allocated(request, [0, 1, 2, 3], 0)
    new = SimpleNamespace(req_id="x", block_ids=([0, 1, 2, 3],), num_computed_tokens=0)
    none = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=())
    engine.scheduler.step(SimpleNamespace(scheduled_new_reqs=[new], scheduled_cached_reqs=none,
                                          num_scheduled_tokens={"x": 16}))  # fmt: skip
    engine.scheduler.finished(request)
    assert len(engine.control.memory) == 1
    engine.control._looked_at = engine.control._clock() - 1
    engine.control._clock = lambda real=engine.control._clock: real() + 1
    engine.scheduler.reported([])
    assert len(engine.control.memory) == 0
    assert engine.control.record.totals.failures("store") == {"deadline": 1}


def test_what_a_rank_never_reports_is_forgotten():
    now = [0.0]
    quorum = connector.Quorum(2, 60.0, clock=lambda: now[0])
    done = Done("store", "r", 0, b"k", 0, 1, 0.1, "")
    assert quorum.complete([done]) == []
    now[0] = 61.0
    assert quorum.complete([done]) == [], "half of it is another attempt's"
    assert len(quorum.complete([done])) == 1 and not quorum._seen and not quorum._since

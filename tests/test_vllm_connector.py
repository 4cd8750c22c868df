"""The connector inside real vLLM, on a random model whose output depends on its whole prefix.

fp32, so that greedy tokens with reuse must equal those without. One engine at a time, in this process.
"""

import gc
import itertools
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

from experiments.models import resolve_model
from workbench.errors import CacheError, EngineRunningError, InvalidInputError
from workbench.events import EVENT_KINDS

BLOCK, CHUNK = 32, 64
TOKENS = 8
TO_THE_TOKEN = {"partial_hits": True}  # the default; most tests here count whole chunks
WHOLE_CHUNKS = {"partial_hits": False}


@contextmanager
def running(cache=None, *, policy="recompute", model=None, **options):
    """A vLLM engine with (or without) the connector; shut down completely afterwards."""
    from vllm import LLM
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import kv_transfer_state as state

    import workbench.connectors.vllm as connector

    settings = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20, "max_model_len": 1024, "block_size": BLOCK,
                "enable_prefix_caching": False, "disable_log_stats": False, "dtype": "float32", "seed": 0}  # fmt: skip
    if cache is not None:
        settings["kv_transfer_config"] = KVTransferConfig(
            kv_connector="WorkbenchConnector", kv_connector_module_path="workbench.connectors.vllm", kv_role="kv_both",
            kv_load_failure_policy=policy, kv_connector_extra_config={"chunk_tokens": CHUNK, **WHOLE_CHUNKS, **cache},
        )  # fmt: skip
    llm = None
    try:
        llm = LLM(model=model or str(resolve_model("random:tiny", progress=False).path), **{**settings, **options})
        core = llm.llm_engine.engine_core.engine_core
        halves = SimpleNamespace(control=None, data=None)
        if cache is not None:
            halves.control = core.scheduler.connector.half.control
            halves.data = state._KV_CONNECTOR_AGENT.half.data
        yield SimpleNamespace(llm=llm, core=core, ask=lambda *a, **k: ask(llm, *a, **k), **vars(halves))
    finally:
        state.ensure_kv_transfer_shutdown()
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        connector.WorkbenchConnector._live.clear()
        llm = None
        gc.collect()


def ask(llm, prompts, max_tokens=TOKENS, salt=None, **sampling):
    """Answers to one prompt or several at once: objects with tokens, cached, reason."""
    from vllm import SamplingParams

    many = prompts if isinstance(prompts[0], list) else [prompts]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **sampling)
    salted = {"cache_salt": salt} if salt else {}
    outputs = llm.generate([{"prompt_token_ids": p, **salted} for p in many], params, use_tqdm=False)
    found = [
        SimpleNamespace(
            tokens=list(o.outputs[0].token_ids), cached=o.num_cached_tokens, reason=o.outputs[0].finish_reason
        )
        for o in outputs
    ]
    return found if isinstance(prompts[0], list) else found[0]


def prompt(seed, length):
    return np.random.default_rng(seed).integers(3, 250, length).tolist()


def stored_chunks(engine):
    return len(engine.control.memory) if engine.control.memory is not None else len(engine.control.tiers[0])


def holds(engine):
    return sum(tier.holds for tier in engine.control.tiers)


@pytest.fixture(scope="module")
def reference():
    """Greedy tokens without any reuse, asked for once each."""
    known = {}

    def tokens_of(prompts, max_tokens=TOKENS):
        missing = [p for p in prompts if (tuple(p), max_tokens) not in known]
        if missing:
            with running() as engine:
                for p, answer in zip(missing, engine.ask(missing, max_tokens), strict=True):
                    known[tuple(p), max_tokens] = answer.tokens
        return [known[tuple(p), max_tokens] for p in prompts]

    shared = prompt(1, 320)
    tokens_of([shared[:n] + prompt(n, 20) for n in range(64, 321, 64)])
    return tokens_of


def test_output_depends_on_the_whole_prefix(reference):
    """Otherwise no test here could notice wrong KV."""
    a = prompt(5, 200)
    b = [prompt(6, 1)[0], *a[1:]]
    first, second = reference([a, b])
    assert first != second


def test_reuse_gives_the_same_tokens(reference):
    shared = prompt(1, 320)
    prompts = [shared[:n] + prompt(n, 20) for n in range(64, 321, 64)]
    with running({"memory_bytes": "64MB", "verify": True}) as engine:
        cold = engine.ask(shared[:320] + prompt(999, 20))
        warm = [engine.ask(p) for p in prompts]
        assert cold.cached == 0
        assert [answer.cached for answer in warm] == [64, 128, 192, 256, 320]
        assert [answer.tokens for answer in warm] == reference(prompts)
        assert engine.data.verified_loads == 15, "each loaded chunk was compared with what was stored"
        assert holds(engine) == 0


def test_bf16_is_bit_equal_to_vllms_own_prefix_cache():
    """The same tokens are computed in the same shapes, so tokens and log-probabilities agree to the bit.

    A full prefill is no oracle in bf16: its matrices have other shapes, and near-ties fall the other way.
    """
    shared = prompt(2, 256)
    prompts = [shared[:n] + prompt(100 + n, 20) for n in (64, 96, 128, 192, 256)]

    def answers(engine):
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=1)
        found = [engine.llm.generate([{"prompt_token_ids": p}], params, use_tqdm=False)[0] for p in [shared, *prompts]]
        chosen = [[step[t].logprob for step, t in zip(o.outputs[0].logprobs, o.outputs[0].token_ids, strict=True)]
                  for o in found]  # fmt: skip
        return [(o.num_cached_tokens, list(o.outputs[0].token_ids), p) for o, p in zip(found, chosen, strict=True)]

    with running(enable_prefix_caching=True, dtype="bfloat16") as engine:
        expected = answers(engine)
    with running({"memory_bytes": "64MB", "chunk_tokens": BLOCK, "verify": True}, dtype="bfloat16") as engine:
        got = answers(engine)
        assert engine.data.verified_loads == sum(cached // BLOCK for cached, _, _ in got) > 0
    assert got == expected


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_prompts_at_every_boundary(reference, prefix_caching):
    """One token is always computed; an unfull tail is never served; nothing is hit below a chunk."""
    lengths = [15, 31, 32, 63, 64, 65, 95, 96, 97, 127, 128, 129]
    prompts = [prompt(7, n) for n in lengths]
    expected = reference(prompts)
    with running({"memory_bytes": "64MB"}, enable_prefix_caching=prefix_caching) as engine:
        engine.ask(prompt(7, 256), 1)
        if prefix_caching:
            engine.llm.reset_prefix_cache()
        for length, p, tokens in zip(lengths, prompts, expected, strict=True):
            answer = engine.ask(p)
            usable = min(length // CHUNK * CHUNK, length - 1)
            assert answer.cached >= usable if prefix_caching else answer.cached == usable
            assert answer.cached < length
            assert answer.tokens == tokens


def test_vllm_prefix_cache_first_and_the_rest_from_here(reference):
    """Blocks that vLLM still has are left alone; only what follows them is loaded, in the middle of a chunk too."""
    long, short = prompt(8, 300), prompt(8, 300)[:110]
    expected = reference([long])
    with running({"memory_bytes": "64MB", "verify": True}, enable_prefix_caching=True) as engine:
        engine.ask(long)
        engine.llm.reset_prefix_cache()
        engine.ask(short, 1)  # vLLM has 96 tokens of it now: a chunk and a half
        answer = engine.ask(long)
        assert answer.cached == 256
        assert [answer.tokens] == expected
        reused = [e.tokens for e in engine.control.record.events if e.kind == "reuse"]
        assert reused[-1] == 256 - 96


def test_chunked_prefill_many_at_once_and_preemption(reference):
    """Few blocks, so that requests are preempted in mid-answer and come back through the cache."""
    prompts = [prompt(20 + i, 230) for i in range(6)]
    expected = reference(prompts, 60)
    block_bytes = 2 * resolve_model("random:tiny", progress=False).bytes_per_token * BLOCK  # fp32 for bf16
    with running({"memory_bytes": "256MB"}, max_num_batched_tokens=128, max_num_seqs=6,
                 kv_cache_memory_bytes=42 * block_bytes) as engine:  # fmt: skip
        for _ in range(2):
            answers = engine.ask(prompts, 60)
            assert [answer.tokens for answer in answers] == expected
        preempted = sum(m.value for m in engine.llm.get_metrics() if m.name == "vllm:num_preemptions")
        assert preempted > 0, "the test must reach preemption"
        assert holds(engine) == 0


def test_abort_leaves_nothing_held():
    with running({"memory_bytes": "64MB"}) as engine:
        from vllm import SamplingParams

        engine.ask(prompt(30, 200), 1)
        params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
        for steps in range(3):
            name = f"to-abort-{steps}"
            engine.llm.llm_engine.add_request(name, {"prompt_token_ids": prompt(30, 200) + [5] * 40}, params)
            for _ in range(steps):
                engine.llm.llm_engine.step()
            engine.llm.llm_engine.abort_request([name])
            engine.llm.llm_engine.step()
        engine.ask(prompt(31, 100), 1)
        assert holds(engine) == 0
        assert not engine.control._running


def test_cache_salt_keeps_tenants_apart():
    p = prompt(40, 200)
    with running({"memory_bytes": "64MB"}) as engine:
        assert engine.ask(p, salt="a").cached == 0
        assert engine.ask(p, salt="b").cached == 0
        assert engine.ask(p).cached == 0
        assert engine.ask(p, salt="a").cached == 192


def test_decoded_tokens_are_stored_once_each(reference):
    """The answer is part of the next turn's prompt: its chunks are there, each stored when it filled up."""
    first = prompt(50, 100)
    with running({"memory_bytes": "64MB"}) as engine:
        answer = engine.ask(first, 100)
        turn = first + answer.tokens + prompt(51, 10)
        follow = engine.ask(turn)
        assert follow.cached == (100 + 99) // CHUNK * CHUNK
        stores = [e.key for e in engine.control.record.events if e.kind == "store" and not e.reason]
        assert len(stores) == len(set(stores)) == (len(turn) + TOKENS - 1) // CHUNK
    assert [follow.tokens] == reference([turn])


@pytest.mark.parametrize("store_decoded", [False])
def test_decoded_tokens_are_left_out_on_request(store_decoded):
    with running({"memory_bytes": "64MB", "store_decoded": store_decoded}) as engine:
        engine.ask(prompt(50, 100), 100)
        assert stored_chunks(engine) == 1


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_load_failure_in_mid_prefix(tmp_path, reference, policy, prefix_caching):
    """The answer is right or an error; what was computed on garbage is stored nowhere; the rest stays usable."""
    p = prompt(60, 300)
    extended = p + prompt(61, 200)
    expected = reference([extended])
    with running({"memory_bytes": 0, "disk_path": str(tmp_path)}, policy=policy,
                 enable_prefix_caching=prefix_caching) as engine:  # fmt: skip
        engine.ask(p, 1)
        engine.data.flush()
        engine.ask(prompt(62, 20), 1)  # a step in which the confirmations arrive
        victim = sorted(tmp_path.glob("*/*.kv"))
        starts = {int.from_bytes(f.read_bytes()[112:116], "little"): f for f in victim}
        damaged = starts[2 * CHUNK]
        content = bytearray(damaged.read_bytes())
        content[-1] ^= 1
        damaged.write_bytes(content)
        if prefix_caching:
            engine.llm.reset_prefix_cache()
        answer = engine.ask(extended)
        if policy == "recompute":
            assert [answer.tokens] == expected
        else:
            assert answer.reason == "error"
        failed = engine.control.record.totals.failures("load")
        assert failed == {"corrupt": 1}
        assert not damaged.exists() or policy == "recompute"
        engine.data.flush()
        if prefix_caching:
            engine.llm.reset_prefix_cache()
        again = engine.ask(extended)  # from what is stored now: right, or the store was poisoned
        assert [again.tokens] == expected
        assert holds(engine) == 0


def test_disk_survives_a_restart_of_vllm(tmp_path, reference):
    p = prompt(70, 300)
    expected = reference([p])
    cache = {"memory_bytes": 0, "disk_path": str(tmp_path)}
    with running(cache) as engine:
        assert engine.ask(p).cached == 0
    with running(cache) as engine:
        answer = engine.ask(p)
        assert answer.cached == 256
        assert [answer.tokens] == expected


def test_more_prompts_than_the_tiers_hold(tmp_path, reference):
    """Evictions in memory and on disk, promotions, and still the right tokens; capacities are kept."""
    shared = prompt(80, 128)
    prompts = [shared + prompt(81 + i, 150) for i in range(6)]
    expected = reference(prompts)
    with running({"memory_bytes": 0, "disk_path": str(tmp_path / "probe")}) as engine:
        memory, disk = engine.control.layout.chunk_nbytes, engine.control.tiers[0].chunk_nbytes
    cache = {"memory_bytes": 5 * memory, "disk_path": str(tmp_path / "kv"), "disk_bytes": 9 * disk}
    with running(cache) as engine:
        for number in [0, 1, 0, 2, 1, 3, 2, 4, 3, 5, 4, 0, 5]:
            assert engine.ask(prompts[number]).tokens == expected[number]
            engine.data.flush()
        events = engine.control.record.totals
        kinds = {(kind, tier) for kind, tier, _ in events.counts}
        assert {
            ("evict", "memory"),
            ("evict", "disk"),
            ("hit", "disk"),
            ("hit", "memory"),
            ("promote", "memory"),
        } <= kinds
        assert {kind for kind, _, _ in events.counts} <= set(EVENT_KINDS)
        for tier in engine.control.tiers:
            assert tier.high_water_bytes <= tier.capacity_bytes
        on_disk = sum(f.stat().st_blocks * 512 for f in (tmp_path / "kv").glob("*/*.kv"))
        assert on_disk <= 9 * disk


def test_hybrid_model_in_one_group():
    """Sliding-window and full layers, merged by vLLM into one group of block tables."""
    with running(model=str(resolve_hybrid())) as engine:
        p = prompt(90, 300)
        expected = engine.ask(p).tokens
    with running({"memory_bytes": "64MB", "verify": True}, model=str(resolve_hybrid())) as engine:
        engine.ask(p)
        answer = engine.ask(p)
        assert answer.cached == 256
        assert answer.tokens == expected
        assert engine.control.layout.num_layers == 6


def resolve_hybrid():
    """A random Gemma 3 with four sliding-window layers and two full ones."""
    import json
    import tempfile
    from pathlib import Path

    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    folder = Path(tempfile.gettempdir()) / "kvworkbench-test-hybrid"
    if not (folder / "done").exists():
        torch.manual_seed(0)
        layers = ["sliding_attention"] * 2 + ["full_attention"]
        config = Gemma3TextConfig(vocab_size=260, hidden_size=64, intermediate_size=128, num_hidden_layers=6,
                                  num_attention_heads=4, num_key_value_heads=2, head_dim=32, sliding_window=64,
                                  layer_types=layers * 2, max_position_embeddings=1024,
                                  initializer_range=0.2, query_pre_attn_scalar=32)  # fmt: skip
        Gemma3ForCausalLM(config).save_pretrained(folder)
        tiny = Path(resolve_model("random:tiny", progress=False).path)
        for file in tiny.glob("*token*"):
            (folder / file.name).write_bytes(file.read_bytes())
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**written, "architectures": ["Gemma3ForCausalLM"]}))
        (folder / "done").touch()
    return folder


def test_a_second_engine_is_refused():
    """vLLM would give both engines one worker connector and silently mix their KV."""
    with running({"memory_bytes": "16MB"}) as engine:
        first = engine.ask(prompt(95, 150)).tokens
        with pytest.raises(EngineRunningError, match="process"):
            from vllm import LLM
            from vllm.config import KVTransferConfig

            LLM(model=str(resolve_model("random:tiny", progress=False).path), enforce_eager=True,
                kv_cache_memory_bytes=16 << 20, max_model_len=256, block_size=BLOCK, dtype="float32",
                kv_transfer_config=KVTransferConfig(
                    kv_connector="WorkbenchConnector", kv_connector_module_path="workbench.connectors.vllm",
                    kv_role="kv_both",
                    kv_connector_extra_config={"chunk_tokens": CHUNK, "memory_bytes": "16MB"}))  # fmt: skip
        assert engine.ask(prompt(95, 150)).tokens == first


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        ({"chunk_tokens": 100}, "chunk_tokens 100 is not a multiple of the block size 32"),
        ({"memory_bytes": 1000}, "one chunk of 64 tokens takes"),
        ({"memory_bytes": 0}, "no tier"),
        ({"memory_bytes": "100TiB"}, "are free"),
        ({"memory_bytes": 0, "disk_path": "/proc/nowhere"}, "cannot be used"),
        ({"memory_byte": "1GB"}, "did you mean 'memory_bytes'"),
    ],
)
def test_settings_that_cannot_work(cache, message):
    with pytest.raises(CacheError, match=message), running(cache):
        pass


def test_invalid_input_is_a_value_error():
    assert issubclass(InvalidInputError, ValueError)


def test_metrics_reach_vllm(tmp_path):
    p = prompt(97, 200)
    with running({"memory_bytes": "64MB", "disk_path": str(tmp_path)}) as engine:
        engine.ask(p)
        engine.data.flush()
        engine.ask(p)
        engine.ask(prompt(98, 20))
        engine.ask(prompt(98, 20))  # what the scheduler counts comes with the step after
        values = {}
        for metric in engine.llm.get_metrics():
            if metric.name.startswith("vllm:kvworkbench"):
                own = [value for label, value in metric.labels.items() if label in ("transfer", "tier", "reason")]
                values[metric.name, *own] = getattr(metric, "count", getattr(metric, "value", None))
        assert values["vllm:kvworkbench_transfer_seconds", "load"] == 3
        assert values["vllm:kvworkbench_transfer_seconds", "write"] == 3
        assert values["vllm:kvworkbench_transfer_bytes", "store"] == 3 * engine.control.layout.chunk_nbytes
        assert values["vllm:kvworkbench_hit_tokens", "memory"] == 192 == values["vllm:kvworkbench_reused_tokens",]
        assert values["vllm:kvworkbench_lookup_tokens",] >= 400
        used = {tier.name: tier.used_bytes for tier in engine.control.tiers}
        assert {tier: values["vllm:kvworkbench_tier_used_bytes", tier] for tier in used} == used


def test_quorum_waits_for_every_rank_and_one_fault_is_everybodys():
    from workbench.connectors.vllm import Quorum
    from workbench.orders import Done

    def done(key, reason="", seconds=1.0):
        return Done("store", "r", 0, key, 0, 10, seconds, reason)

    quorum = Quorum(2)
    assert quorum.complete([done(b"a"), done(b"b")]) == []
    assert quorum.complete([done(b"a", seconds=3.0)]) == [Done("store", "r", 0, b"a", 0, 20, 3.0, "")]
    assert [d.reason for d in quorum.complete([done(b"b", "ENOSPC")])] == ["ENOSPC"]
    assert list(itertools.chain(*quorum._seen.values())) == []


@pytest.mark.parametrize("place", ["memory", "disk"])
@pytest.mark.parametrize(("codec", "dtype"), [("lossless", "float32"), ("int8", "bfloat16")])
def test_a_codec_in_the_path(codec, dtype, place, reference, tmp_path):
    """Encoded on the way down, decoded on the way up; what is lossless leaves the answer as it was."""
    shared = prompt(71, 256)
    expected = reference([shared + prompt(74, 20)])[0]
    cache = {"memory_codec": codec} if place == "memory" else {"memory_bytes": 0, "disk_path": str(tmp_path / "kv"),
                                                               "codec": codec}  # fmt: skip
    with running(cache, dtype=dtype) as engine:
        engine.ask(shared + prompt(72, 20))
        assert engine.data.flush()
        engine.ask(prompt(73, 20))  # a step that brings the report of what was written
        again = engine.ask(shared + prompt(74, 20))
        assert again.cached == 256
        tier = engine.control.tiers[0]
        assert tier.name == place and tier.used_bytes < len(tier) * engine.control.layout.chunk_nbytes + 4096 * len(
            tier
        )
        if codec == "lossless":
            assert again.tokens == expected


# ---------------------------------------------------------------- chunks that follow the text, and tails


def test_chunks_that_end_with_a_turn_and_tails_give_the_same_tokens(reference):
    """A conversation: each prompt is hit to the last whole block of the one before it."""
    end = 250
    turns = [[token if token != end else 249 for token in prompt(300 + n, 75)] + [end] for n in range(4)]
    prompts = [[token for turn in turns[: n + 1] for token in turn] for n in range(4)]
    expected = reference(prompts)
    cache = {"memory_bytes": "64MB", "chunk_tokens": 128, "verify": True, "store_decoded": False}
    with running({**cache, "boundary_tokens": [end], "min_chunk_tokens": BLOCK}) as engine:
        answers = [engine.ask(p) for p in prompts]
        assert [answer.tokens for answer in answers] == expected
        assert [answer.cached for answer in answers] == [0, 64, 128, 224], "to the last whole block of each turn"
        assert holds(engine) == 0 and engine.data.verified_loads > 0
    with running({**cache, "store_partial": True}) as engine:
        answers = [engine.ask(p) for p in prompts]
        assert [answer.tokens for answer in answers] == expected
        assert [answer.cached for answer in answers] == [0, 76, 152, 228]
        again = engine.ask(prompts[0])
        assert (again.cached, again.tokens) == (75, expected[0])
        changed = [*prompts[0][:40], 5, *prompts[0][41:]]
        assert engine.ask(changed).cached == 0, "a tail that differs is not served"
        assert holds(engine) == 0


# ---------------------------------------------------------------- hits to the token


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_hits_to_the_token_give_the_same_tokens(reference, prefix_caching):
    """Wherever prompts part, and again for the prompt itself, of which one token is computed."""
    shared = prompt(1, 320)
    lengths = [17, 31, 32, 33, 63, 64, 65, 100, 159, 200, 255, 256, 257, 300, 319]
    prompts = [shared[:n] + prompt(500 + n, 20) for n in lengths]
    expected = reference([shared, *prompts])
    cache = {"memory_bytes": "64MB", "verify": True, **TO_THE_TOKEN}
    with running(cache, enable_prefix_caching=prefix_caching) as engine:
        assert engine.ask(shared).cached == 0
        answers = [engine.ask(p) for p in [shared, *prompts]]
        worth_it = [n - n % CHUNK if n % CHUNK < 16 else n for n in lengths]
        assert [answer.cached for answer in answers] == [319, *worth_it]
        assert [answer.tokens for answer in answers] == expected
        assert holds(engine) == 0
        assert prefix_caching or engine.data.verified_loads > 0, "whole chunks were compared with what was stored"


def test_hits_to_the_token_in_one_batch_with_preemption(reference):
    """Many at once, prefilled in pieces, in too few blocks; each hits within chunks that the others store."""
    shared = prompt(1, 320)
    prompts = [shared[:n] + prompt(600 + n, 30) for n in range(40, 320, 23)]
    expected = reference(prompts, 40)
    cache = {"memory_bytes": "2MB", **TO_THE_TOKEN}
    with running(
        cache, max_num_batched_tokens=64, max_num_seqs=8, num_gpu_blocks_override=24, max_model_len=512
    ) as engine:
        engine.ask(shared)
        for _ in range(2):
            answers = engine.ask(prompts, 40)
            assert [answer.tokens for answer in answers] == expected
        assert sum(answer.cached for answer in answers) > 1500
        assert holds(engine) == 0


def test_a_conversation_is_hit_to_where_its_answer_was_last_stored(reference):
    question, more = prompt(700, 90), prompt(701, 21)
    (answer,) = reference([question], 60)
    second = question + answer + more
    (expected,) = reference([second])
    with running({"memory_bytes": "64MB", **TO_THE_TOKEN}) as engine:
        assert engine.ask(question, 60).tokens == answer
        again = engine.ask(second)
        assert again.cached == 128 and again.tokens == expected, "every half chunk of the answer is stored"


def test_a_load_that_fails_within_a_block_is_computed_anew(tmp_path, reference):
    shared = prompt(1, 320)
    asked = shared[:110] + prompt(800, 20)
    (expected,) = reference([asked])
    with running({"memory_bytes": 0, "disk_path": str(tmp_path), **TO_THE_TOKEN}) as engine:
        engine.ask(shared)
        engine.data.flush()
        damaged = sorted(tmp_path.rglob("*.kv"))
        for path in damaged:
            data = bytearray(path.read_bytes())
            data[-3] ^= 1
            path.write_bytes(data)
        assert engine.ask(asked).tokens == expected
        engine.data.flush()
        again = engine.ask(asked)
        assert again.tokens == expected and again.cached == len(asked) - 1, "what was computed anew was stored"

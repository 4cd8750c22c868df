"""Workloads send what they say: shared prefixes are identical token by token, and the bound is the true bound."""

import os
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import IDENTITY, Pages

from experiments.models import CACHE_VARIABLE, resolve_model
from experiments.traces import Trace, generators
from experiments.workloads import (
    Request,
    Workload,
    _texts,
    long_document,
    make_workload,
    resolve_workload,
    workload_names,
)
from workbench.config import CacheConfig
from workbench.engine import CacheEngine
from workbench.errors import InvalidInputError, UnknownNameError
from workbench.layout import KVLayout

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM_ROLE = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
SYSTEM_DROPPED = CHATML.replace("messages %}", "messages if m.role == 'user' %}")


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        return resolve_model("random:tiny", progress=False).path


@pytest.fixture
def tokenizer(tokenizer_folder):
    """A tokenizer whose ids are bytes, so that a test can read a prompt back without it."""
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tokenizer_folder)


def make(tokenizer, **options) -> Workload:
    options = {"groups": 3, "documents_per_group": 2, "document_tokens": 700, "questions": 3, **options}
    return resolve_workload("long_document")(tokenizer, **options)


def common_prefix(a: Request, b: Request) -> int:
    length = min(len(a.token_ids), len(b.token_ids))
    differ = a.token_ids[:length] != b.token_ids[:length]
    return int(differ.argmax()) if differ.any() else length


def brute_force_bound(workload: Workload, chunk_tokens: int) -> list[int]:
    bounds = []
    for index, request in enumerate(workload.requests):
        longest = max((common_prefix(request, earlier) for earlier in workload.requests[:index]), default=0)
        bounds.append(min(longest // chunk_tokens * chunk_tokens, len(request.token_ids) - 1))
    return bounds


def plain_request(index: int, token_ids) -> Request:
    return Request(f"r{index}", token_ids, group=0, document=0, question=index, kind="warm")


# --- names and requests


def test_names_are_file_names_and_a_wrong_one_lists_them():
    assert "long_document" in workload_names()
    assert resolve_workload("long_document") is long_document.long_document
    with pytest.raises(UnknownNameError, match=r"'long_documents' \(did you mean 'long_document'\?\).*long_document"):
        resolve_workload("long_documents")


@pytest.mark.parametrize("ids", [[], [-1], [2**31], [2**32 + 5], [1.0], [True], [[1, 2]]])
def test_request_refuses_ids_that_are_none(ids):
    with pytest.raises(InvalidInputError, match="r0"):
        plain_request(0, ids)


def test_request_keeps_its_own_ids():
    given_ids = np.array([1, 2**31 - 1], np.int64)
    request = plain_request(0, given_ids)
    given_ids[0] = 7
    assert request.token_ids.dtype == np.int32 and request.token_ids.tolist() == [1, 2**31 - 1]
    with pytest.raises(ValueError):
        request.token_ids[0] = 3


# --- the bound


@settings(max_examples=200, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=8),
    chunk_tokens=st.integers(1, 5),
)
def test_bound_equals_brute_force(prompts, chunk_tokens):
    requests = tuple(plain_request(index, ids) for index, ids in enumerate(prompts))
    workload = Workload("drawn", requests, seed=0, description="")
    assert workload.upper_bound_hit_tokens(chunk_tokens).tolist() == brute_force_bound(workload, chunk_tokens)


def test_bound_of_a_known_sequence():
    first, longer, other = list(range(8)), [*range(8), 9], [5, *range(1, 8)]
    requests = tuple(plain_request(index, ids) for index, ids in enumerate([first, first, longer, other, [0, 1, 2]]))
    workload = Workload("known", requests, seed=0, description="")
    assert workload.upper_bound_hit_tokens(4).tolist() == [0, 7, 8, 0, 0]
    with pytest.raises(InvalidInputError, match="chunk_tokens is 0"):
        workload.upper_bound_hit_tokens(0)


# --- long documents


@pytest.mark.parametrize("template", [None, CHATML, NO_SYSTEM_ROLE, SYSTEM_DROPPED])
def test_prompts_share_exactly_what_they_should(tokenizer, template):
    tokenizer.chat_template = template
    workload = make(tokenizer)
    ends = {}
    for request in workload.requests:
        prompt = bytes(request.token_ids.tolist())
        document_start = prompt.index(b"Document:\n\n") + len(b"Document:\n\n")
        ends[request.request_id] = document_start + 700
        tail = prompt[document_start + 700 :]
        assert tail.startswith(b"\n\nEnd of the document. ") and str(request.text).encode() in tail
        assert f"Desk 0-{request.group} of".encode() in prompt[:80]
        assert prompt.count(b"You are the assistant at this desk.") == 1
        assert prompt.endswith(b"<|im_start|>assistant\n" if template else b"\n\nAnswer:")
    for a, b in combinations(workload.requests, 2):
        shared, end = common_prefix(a, b), ends[a.request_id]
        if (a.group, a.document) == (b.group, b.document):
            assert end <= shared < len(a.token_ids)
        elif a.group == b.group:
            assert end - 700 <= shared < end
        else:
            assert shared < 64


def test_order_and_kinds(tokenizer):
    workload = make(tokenizer, groups=2)
    assert [(request.request_id, request.kind) for request in workload.requests] == [
        *[("g0-d0-q0", "cold"), ("g0-d1-q0", "shared"), ("g1-d0-q0", "cold"), ("g1-d1-q0", "shared")],
        *[(f"g{g}-d{d}-q{q}", "warm") for q in (1, 2) for g in (0, 1) for d in (0, 1)],
    ]
    bounds = workload.upper_bound_hit_tokens(64)
    for request, bound in zip(workload.requests, bounds, strict=True):
        expected = {"cold": range(1), "shared": range(1024, 2048), "warm": range(2048, len(request.token_ids))}
        assert bound in expected[request.kind], request.request_id


def test_same_seed_same_prompts_other_seed_cold(tokenizer):
    first, again, other = make(tokenizer), make(tokenizer), make(tokenizer, seed=1)
    assert first.sources == again.sources
    for a, b in zip(first.requests, again.requests, strict=True):
        assert np.array_equal(a.token_ids, b.token_ids) and a.text == b.text
    assert max(common_prefix(a, b) for a in first.requests for b in other.requests) < 64
    assert [source.origin for source in first.sources] != [source.origin for source in other.sources]


def test_more_questions_than_the_list_has_stay_distinct(tokenizer):
    workload = make(tokenizer, groups=1, documents_per_group=1, questions=30)
    assert len({request.text for request in workload.requests}) == 30


def test_tokenizer_that_starts_texts_with_a_token(tokenizer):
    from tokenizers.processors import TemplateProcessing

    backend = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)])
    for request in make(tokenizer).requests:
        assert np.flatnonzero(request.token_ids == 256).tolist() == [0]


def test_sources_account_for_every_document_token(tokenizer):
    workload = make(tokenizer, groups=4, document_tokens=30_000)
    assert sum(source.tokens for source in workload.sources) == 4 * 2 * 30_000
    assert all(source.licence and len(source.sha256) == 64 for source in workload.sources)
    prompts = [bytes(request.token_ids.tolist()) for request in workload.requests[: 4 * 2]]
    documents = [prompt[prompt.index(b"Document:\n\n") + 11 :][:30_000] for prompt in prompts]
    assert len({document[:200] for document in documents}) == 8, "no document begins like another"


def test_without_debian_python_itself_is_enough(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(_texts, "_COMMON_LICENCES", tmp_path / os.devnull)
    workload = make(tokenizer, groups=5, document_tokens=8000)
    assert {source.licence for source in workload.sources} == {"PSF-2.0"}


@pytest.mark.parametrize("name", ["groups", "documents_per_group", "document_tokens", "questions", "max_tokens"])
def test_counts_below_one(tokenizer, name):
    with pytest.raises(InvalidInputError, match=f"{name} is 0; at least 1"):
        make(tokenizer, **{name: 0})


def test_more_text_than_there_is(tokenizer):
    with pytest.raises(InvalidInputError, match=r"texts hold \d{6,} tokens.*fewer or shorter"):
        make(tokenizer, document_tokens=10**9)


# --- every workload

SMALL = {
    "long_document": dict(groups=2, documents_per_group=1, document_tokens=400),
    "chat": dict(users=3, rounds=4, question_tokens=60, answer_tokens=100),
    "rag": dict(requests=12, passages=5, passages_per_request=2, passage_tokens=150),
    "agent": dict(sessions=2, steps=4, result_tokens=120),
    "shared_prefix": dict(prefixes=2, prefix_tokens=500, questions=4),
    "one_off": dict(requests=8, text_tokens=300),
    "mixed": dict(requests=9, shares={"chat": 2, "one_off": 1}, settings={"chat": dict(users=2, rounds=4)}),
    "trace": dict(trace=generators.chat(sessions=6, turns=4, seed=3), requests=15, block_tokens=32),
}


def small(name, tokenizer, **options) -> Workload:
    return make_workload(name, tokenizer, **{**SMALL[name], **options})


def test_every_workload_is_tested():
    assert set(SMALL) == set(workload_names())


@pytest.mark.parametrize("name", sorted(SMALL))
@pytest.mark.parametrize("template", [None, CHATML, NO_SYSTEM_ROLE])
def test_same_seed_same_requests_and_the_bound_is_the_true_one(tokenizer, name, template):
    tokenizer.chat_template = template
    workload, again, other = small(name, tokenizer), small(name, tokenizer), small(name, tokenizer, seed=1)
    assert workload.name == name and len({r.request_id for r in workload.requests}) == len(workload.requests)
    for a, b in zip(workload.requests, again.requests, strict=True):
        assert np.array_equal(a.token_ids, b.token_ids)
        assert (a.request_id, a.kind, a.arrival_s, a.max_tokens) == (b.request_id, b.kind, b.arrival_s, b.max_tokens)
    assert max(common_prefix(a, b) for a in workload.requests for b in other.requests) < 40
    for chunk_tokens in (32, 128):
        bounds = workload.upper_bound_hit_tokens(chunk_tokens)
        assert bounds.tolist() == brute_force_bound(workload, chunk_tokens)
    tokens = sum(len(r.token_ids) for r in workload.requests)
    assert workload.upper_bound_hit_rate(32) == workload.upper_bound_hit_tokens(32).sum() / tokens
    assert (workload.upper_bound_hit_rate(32) > 0) == (name != "one_off")
    for a, b in combinations(workload.requests, 2):
        assert a.group == b.group or common_prefix(a, b) < 32, "groups share no prefix"


@pytest.mark.parametrize("least_part", [0, 16], ids=["whole chunks", "to the token"])
@pytest.mark.parametrize("name", sorted(SMALL))
def test_an_engine_with_room_finds_exactly_the_bound(tokenizer, name, least_part):
    """With hits that end within a chunk: all but parts of under 16 tokens, which are not worth moving."""
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_size=4, block_size=32, chunk_tokens=64)
    workload = small(name, tokenizer)
    blocks = list(range(max(len(r.token_ids) for r in workload.requests) // 32 + 1))
    pages = Pages(len(blocks), layout)
    to_the_token = least_part > 0
    config = CacheConfig(chunk_tokens=64, memory_bytes="64MiB", partial_hits=to_the_token)
    bounds = workload.upper_bound_hit_tokens(1 if to_the_token else 64)
    with CacheEngine(replace(IDENTITY, layout=layout), config) as engine:
        for request, bound in zip(workload.requests, bounds, strict=True):
            found = min(engine.lookup(request.token_ids), len(request.token_ids) - 1)
            assert bound - least_part < found <= bound or found == bound, request.request_id
            engine.store(request.token_ids, pages.table, blocks=blocks)


def test_chat_prompts_grow_by_what_was_said(tokenizer):
    tokenizer.chat_template = CHATML
    workload = small("chat", tokenizer)
    assert [r.request_id for r in workload.requests[:4]] == ["u0-r0", "u1-r0", "u2-r0", "u0-r1"]
    rounds = {r.request_id: r for r in workload.requests}
    for user in range(3):
        for number in range(1, 4):
            before, now = rounds[f"u{user}-r{number - 1}"], rounds[f"u{user}-r{number}"]
            assert common_prefix(before, now) == len(before.token_ids), "the whole last prompt is in the next one"
            grown = len(now.token_ids) - len(before.token_ids)
            framing = len("<|im_end|>\n<|im_start|>user\n\n\n<|im_end|>\n<|im_start|>assistant\n") + len(now.text)
            assert grown == 100 + 60 + framing
    assert bytes(rounds["u0-r3"].token_ids.tolist()).count(b"<|im_start|>assistant\n") == 4
    # all but the new question and the answer before it is found again
    assert workload.upper_bound_hit_tokens(1).tolist()[-1] == len(rounds["u2-r2"].token_ids)


def test_rag_in_the_pools_order_shares_more_than_permuted(tokenizer):
    def rate(permuted_share):
        options = dict(requests=40, passages=5, passages_per_request=3, permuted_share=permuted_share)
        return small("rag", tokenizer, **options).upper_bound_hit_rate(32)

    assert rate(0.0) > rate(0.5) > rate(1.0) > 0.2
    with pytest.raises(InvalidInputError, match="6 of 5 passages"):
        small("rag", tokenizer, passages_per_request=6)


def test_agents_share_their_tools_and_keep_their_history(tokenizer):
    workload = small("agent", tokenizer)
    steps = {r.request_id: r for r in workload.requests}
    tools = bytes(steps["s0-t0"].token_ids.tolist())
    assert tools.count(b'"name": "search"') == 1
    assert common_prefix(steps["s0-t0"], steps["s1-t0"]) > tools.index(b'"name": "finish"')
    assert common_prefix(steps["s1-t2"], steps["s1-t3"]) == len(steps["s1-t2"].token_ids)
    added = bytes(steps["s1-t3"].token_ids.tolist())[len(steps["s1-t2"].token_ids) :]
    assert b'"tool": ' in added and b'"step": 2' in added and b"Result:" in added


def test_shared_prefix_is_found_by_all_but_the_first(tokenizer):
    workload = small("shared_prefix", tokenizer)
    bounds = workload.upper_bound_hit_tokens(1)
    assert [r.kind for r in workload.requests] == ["cold"] * 2 + ["warm"] * 6
    assert bounds[:2].max() < 32 and bounds[2:].min() > 500


def test_one_off_prompts_share_no_chunk(tokenizer):
    for template in (None, CHATML):
        tokenizer.chat_template = template
        workload = make_workload("one_off", tokenizer, requests=40, text_tokens=200)
        assert max(common_prefix(a, b) for a, b in combinations(workload.requests, 2)) < 32
        assert not workload.upper_bound_hit_tokens(32).any()


def test_mixed_keeps_shares_orders_and_groups(tokenizer):
    workload = small("mixed", tokenizer)
    names = [r.request_id for r in workload.requests]
    chats = [name for name in names if name.startswith("chat-")]
    whole = make_workload("chat", tokenizer, users=2, rounds=4)
    assert chats == [f"chat-{r.request_id}" for r in whole.requests][:6] and len(names) == 9
    assert names != sorted(names) and names != chats + [name for name in names if name not in chats]
    with pytest.raises(InvalidInputError, match=r"part chat has 8 requests.*asks for 12"):
        small("mixed", tokenizer, requests=18)
    with pytest.raises(InvalidInputError, match="more than 0"):
        small("mixed", tokenizer, shares={})


def test_trace_keeps_sharing_and_arrivals(tokenizer):
    source = generators.chat(sessions=6, turns=4, seed=3)
    workload = make_workload("trace", tokenizer, trace=source, requests=15, block_tokens=32)
    for number, request in enumerate(workload.requests):
        assert request.arrival_s == source.timestamps[number] - source.timestamps[0]
        assert len(request.token_ids) == source.lengths[number] * 32
    blocks = np.split(source.ids, source.offsets[1:-1])
    for (i, a), (j, b) in combinations(enumerate(workload.requests), 2):
        length = min(len(blocks[i]), len(blocks[j]))
        differ = blocks[i][:length] != blocks[j][:length]
        shared = int(differ.argmax()) if differ.any() else length
        assert shared * 32 <= common_prefix(a, b) < shared * 32 + 32


def test_trace_cuts_long_prompts_and_fills_what_blocks_leave(tokenizer):
    lone = Trace("lone", ids=np.array([0, 1, 0], np.int32), offsets=np.array([0, 2, 3]), block_tokens=100,
                 timestamps=np.array([5.0, 6.0]), input_tokens=np.array([250, 100]), output_tokens=np.array([100, 0]),
                 tenants=np.zeros(2, np.int32))  # fmt: skip
    full = make_workload("trace", tokenizer, trace=lone, block_tokens=50).requests
    assert [len(r.token_ids) for r in full] == [125, 50] and [r.max_tokens for r in full] == [50, 1]
    assert common_prefix(*full) == 50 and full[1].arrival_s == 1.0
    short = make_workload("trace", tokenizer, trace=lone, block_tokens=50, max_prompt_tokens=60)
    assert [len(r.token_ids) for r in short.requests] == [60, 50] and "1 prompts cut" in short.description
    with pytest.raises(InvalidInputError, match="block_tokens is 8"):
        make_workload("trace", tokenizer, trace=lone, block_tokens=8)


def test_whole_sessions_of_a_trace(tokenizer):
    source = generators.chat(sessions=200, turns=4, seed=3)
    options = dict(trace=source, requests=25, block_tokens=32, sample="sessions")
    workload = make_workload("trace", tokenizer, **options)
    numbers = [int(r.request_id[1:]) for r in workload.requests]
    assert numbers == sorted(numbers) and 15 < len(numbers) <= 25
    chosen = {source.tenants[number] for number in numbers}
    assert len(numbers) == np.isin(source.tenants, list(chosen)).sum(), "each session is whole"
    other = make_workload("trace", tokenizer, **options, seed=1)
    assert numbers != [int(r.request_id[1:]) for r in other.requests]
    nameless = replace(source, tenants=np.zeros_like(source.tenants))
    told = make_workload("trace", tokenizer, **{**options, "trace": nameless})
    of = {source.tenants[int(r.request_id[1:])] for r in told.requests}
    assert len(told.requests) == np.isin(source.tenants, list(of)).sum(), "sessions are told by what they begin with"
    with pytest.raises(UnknownNameError, match="did you mean 'first'"):
        make_workload("trace", tokenizer, trace=source, sample="frist")


def test_a_known_trace_becomes_requests(tokenizer):
    try:
        workload = make_workload("trace", tokenizer, trace="mooncake_conversation", requests=30, sample="sessions")
    except InvalidInputError as error:
        pytest.skip(f"the trace is not here: {error}")
    arrivals = [r.arrival_s for r in workload.requests]
    assert arrivals == sorted(arrivals) and arrivals[-1] > 0
    assert workload.upper_bound_hit_rate(256) > 0.1


# --- arrivals


def test_poisson_arrivals_have_the_rate_and_the_order(tokenizer):
    requests = tuple(plain_request(index, [1]) for index in range(4000))
    workload = Workload("many", requests, seed=5, description="many").with_arrivals(20.0)
    arrivals = np.array([r.arrival_s for r in workload.requests])
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0 and gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.1) and gaps.std() == pytest.approx(1 / 20, rel=0.1)
    again = Workload("many", requests, seed=5, description="many").with_arrivals(20.0)
    assert [r.arrival_s for r in again.requests] == arrivals.tolist()
    assert "20 requests/s" in workload.description
    with pytest.raises(InvalidInputError, match="requests_per_s is 0"):
        workload.with_arrivals(0)


def test_a_traces_own_arrivals_are_stretched(tokenizer):
    own = small("trace", tokenizer)
    paced = small("trace", tokenizer, requests_per_s=2.0)
    before, after = (np.array([r.arrival_s for r in w.requests]) for w in (own, paced))
    assert after[-1] == pytest.approx(14 / 2.0) and np.allclose(after / after[-1], before / before[-1])


def test_settings_common_to_all(tokenizer):
    workload = small("chat", tokenizer, requests_per_s=2.0, max_tokens=7)
    assert {r.max_tokens for r in workload.requests} == {7} and workload.requests[1].arrival_s > 0
    with pytest.raises(UnknownNameError, match="did you mean 'users'"):
        make_workload("chat", tokenizer, user=3)
    with pytest.raises(InvalidInputError, match="rounds is 0"):
        small("chat", tokenizer, rounds=0)
    with pytest.raises(UnknownNameError, match="did you mean 'chat'"):
        make_workload("chats", tokenizer)


def test_a_template_that_drops_answers_is_refused(tokenizer):
    tokenizer.chat_template = SYSTEM_DROPPED
    with pytest.raises(InvalidInputError, match="cannot write the messages system, user, assistant, user"):
        small("chat", tokenizer)

"""Workloads send what they say: shared prefixes are identical token by token, and the bound is the true bound."""

import os
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.models import CACHE_VARIABLE, resolve_model
from experiments.workloads import Request, Workload, long_document, resolve_workload, workload_names
from workbench.errors import InvalidInputError, UnknownNameError

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
    monkeypatch.setattr(long_document, "_COMMON_LICENCES", tmp_path / os.devnull)
    workload = make(tokenizer, groups=5, document_tokens=8000)
    assert {source.licence for source in workload.sources} == {"PSF-2.0"}


@pytest.mark.parametrize("name", ["groups", "documents_per_group", "document_tokens", "questions", "max_tokens"])
def test_counts_below_one(tokenizer, name):
    with pytest.raises(InvalidInputError, match=f"{name} is 0; at least 1"):
        make(tokenizer, **{name: 0})


def test_more_text_than_there_is(tokenizer):
    with pytest.raises(InvalidInputError, match=r"texts hold \d{6,} tokens.*fewer or shorter"):
        make(tokenizer, document_tokens=10**9)

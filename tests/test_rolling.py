"""Replacing a server while requests run: nobody notices, and the new one finds what the others have computed."""

import asyncio

import numpy as np
import pytest
from test_client import DONE, USAGE, Server, event, listening

from experiments.arms import arm_by_name
from experiments.rolling import _Load, found_of_others, roll
from experiments.router import Router
from experiments.workloads import Request, Workload
from workbench.errors import CacheError

ANSWER = [(0.05, event(choices=[{"text": "a", "token_ids": [1]}]) + USAGE + DONE)]


def made_workload(documents: int = 3, questions: int = 2) -> Workload:
    requests = tuple(
        Request(f"p{document}-q{question}", np.arange(1, 40), document, 0, question, "warm", max_tokens=3)
        for question in range(questions)
        for document in range(documents)
    )
    return Workload("made", requests, 0, "made up")


def test_tokens_found_of_others_count_once_a_document_and_server():
    def row(arm, group, cached_tokens, error=""):
        return {"arm": arm, "group": group, "document": 0, "cached_tokens": cached_tokens, "error": error}

    rows = [row("a", 0, 0), row("b", 0, 700), row("b", 0, 800), row("b", 1, 5), row("c", 1, 0, "HTTP 500"),
            row("c", 1, 600), row("c", 2, 9), row("a", 2, 400), row("c", 0, 300)]  # fmt: skip
    assert found_of_others(rows) == {"a": 400, "b": 700, "c": 900}


def test_servers_are_changed_under_a_load_that_never_pauses():
    async def main():
        first, second = Server(ANSWER), Server(ANSWER)
        async with listening(first) as one, listening(second) as two:
            with Router([one]) as router, _Load(made_workload(), router.url, "small", 100.0) as load:
                await asyncio.to_thread(load.wait_for_rounds, 1)
                router.set_servers([two])
                assert await asyncio.to_thread(router.drain, one)
                seen = len(first.seen)
                await asyncio.to_thread(load.wait_for_rounds, 1)
                rows = await asyncio.to_thread(load.end)
            assert len(first.seen) == seen, "nothing more goes to a server that was taken out"
            return rows, {one: first, two: second}

    rows, servers = asyncio.run(main())
    assert not any(row["error"] for row in rows) and {row["served_by"] for row in rows} == set(servers)
    assert len(rows) == sum(len(server.seen) for server in servers.values()) and len(rows) % 3 == 0
    assert [row["round"] for row in rows] == sorted(row["round"] for row in rows) and rows[-1]["round"] >= 3
    assert [row["request_id"] for row in rows[:9]] == [f"p{d}-q{q}" for q in (0, 1, 0) for d in range(3)]


def test_a_load_that_breaks_ends_the_wait():
    with _Load(made_workload(), "http://127.0.0.1:9", "", 1.0) as load, pytest.raises(CacheError):
        load.wait_for_rounds(1)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.redis
@pytest.mark.timeout(600)
def test_a_rolling_pair_loses_no_request_and_shares_what_it_computed(tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    if arm_by_name("redis").missing:
        pytest.skip(arm_by_name("redis").missing)
    run = roll("random:llama-2layer-h64", runs=tmp_path, threads=1)
    rolling, requests = run.environment["rolling"], run.requests
    assert rolling["failed"] == 0 and rolling["drained"] and not rolling["errors"]
    assert rolling["requests"] == requests.height == sum(rolling["answered"].values())
    assert min(rolling["answered"].values()) > 0, "each of the three answered some"
    found = rolling["found_of_others"]
    assert found["b"] > 0 and found["c"] >= 512, "one computed it, the other found it in Redis"
    moments = rolling["moments_s"]
    assert list(moments) == sorted(moments, key=moments.get), "A is closed after what it had begun"
    loads = run.events.filter(kind="load", arm="c")
    assert loads.height and set(loads["tier"]) <= {"redis", "memory"} and "redis" in set(loads["tier"])
    assert set(loads["request"]) <= set(requests.filter(arm="c")["engine_request"])

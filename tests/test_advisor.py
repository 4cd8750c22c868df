"""Logs in, advice out: every format gives the same trace, every refusal names its row, every verdict can happen."""

import json
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from experiments.advisor import advise
from experiments.advisor_logs import ESTIMATED, estimated_tokens, read_log
from experiments.cli import app
from experiments.cost import cost_model
from experiments.replay import replay
from experiments.traces import chat
from workbench.errors import InvalidInputError, UnknownNameError

GIB = 2**30
RULES = " ".join(f"Rule {number}: answer politely and keep to the facts." for number in range(60))


def messages(question, system=RULES):
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def write(tmp_path, rows, name="log.jsonl"):
    path = tmp_path / name
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def shared_log(tmp_path, count=20):
    rows = [{"messages": messages(f"Question {n}: what about case {n * 7919}?"), "timestamp": 100.0 + n}
            for n in range(count)]  # fmt: skip
    return write(tmp_path, rows)


# ---------------------------------------------------------------- reading


def test_text_that_is_equal_gives_equal_tokens_and_no_others():
    assert estimated_tokens("the same words") == estimated_tokens("the same words")
    assert estimated_tokens("the same words") != estimated_tokens("the same wards")
    words = "A sentence of ordinary English words, with a number such as 1234 and an end."
    assert 0.9 * len(words) / 4 < len(estimated_tokens(words)) < 1.6 * len(words) / 4
    assert len(estimated_tokens("漢字 и кириллица")) > 4 and estimated_tokens("") == []


def test_every_wrapping_of_a_request_is_the_same_trace(tmp_path):
    body = {"model": "m", "messages": messages("Why?"), "user": "u1"}
    forms = [
        [body, body],
        [{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}] * 2,
        [{"request": body, "response": {"usage": {"completion_tokens": 7}}, "created": 1_700_000_000}] * 2,
        [body | {"messages": [{"role": "system", "content": [{"type": "text", "text": RULES}]}, body["messages"][1]]}]
        * 2,
    ]  # fmt: skip
    traces = [read_log(write(tmp_path, rows, f"{number}.jsonl")) for number, rows in enumerate(forms)]
    for trace in traces:
        assert trace.ids.tolist() == traces[0].ids.tolist() and trace.input_tokens.tolist() == [
            *traces[0].input_tokens]  # fmt: skip
    assert traces[2].output_tokens.tolist() == [7, 7] and traces[2].timestamps[0] == 1_700_000_000
    assert ESTIMATED in traces[0].notes


def test_prompts_of_token_ids_need_no_tokenizer(tmp_path):
    first, second = list(range(100)), [*range(64), *range(500, 540)]
    trace = read_log(write(tmp_path, [{"prompt": first}, {"prompt": second}]))
    assert trace.input_tokens.tolist() == [100, 104] and trace.block_tokens == 16
    assert trace.lengths.tolist() == [6, 6] and trace.distinct == 8  # four blocks of 16 are common


def test_vllms_log_is_the_same_as_the_prompts_in_it(tmp_path):
    prompts = [list(range(80)), [*range(48), *range(900, 950)]]
    lines = ["INFO 11-29 12:00:00 [api_server.py:1] vLLM API server version 0.32.0\n"]
    for second, ids in enumerate(prompts):
        lines += [
            f"DEBUG 11-29 12:00:0{second} [request_logger.py:55] Request cmpl-{second} details: prompt: 'it\\'s a, "
            f"prompt', prompt_token_ids: {ids}, prompt_embeds shape: None.\n",
            f"INFO 11-29 12:00:0{second} [request_logger.py:65] Received request cmpl-{second}: params: "
            "SamplingParams(n=1), lora_request: None.\n",
        ]
    trace = read_log(write(tmp_path, lines, "vllm.log"))
    same = read_log(write(tmp_path, [{"prompt": ids} for ids in prompts]))
    assert trace.ids.tolist() == same.ids.tolist() and trace.input_tokens.tolist() == [80, 98]
    assert np.diff(trace.timestamps).tolist() == [1.0]


def test_a_vllm_log_without_prompts_says_what_to_switch_on(tmp_path):
    line = ("INFO 11-29 12:00:00 [loggers.py:283] Engine 000: Avg prompt throughput: 5.0 tokens/s, GPU KV cache usage: "
            "1.0%, Prefix cache hit rate: 43.5%\n")  # fmt: skip
    with pytest.raises(InvalidInputError, match=r"43\.5 %.*--enable-log-requests"):
        read_log(write(tmp_path, [line], "vllm.log"))


@pytest.mark.parametrize(
    "row, said",
    [
        ("{broken\n", "row 2: not JSON"),
        ("[1, 2]\n", "row 2: a JSON object"),
        ({"model": "m"}, "row 2: no 'messages or prompt'"),
        ({"messages": [{"content": "no role"}]}, "row 2: no 'role'"),
        ({"prompt": {"a": 1}}, "row 2: ValueError"),
        ({"messages": messages("x"), "timestamp": "yesterday"}, "row 2: ValueError"),
    ],
)
def test_a_bad_row_is_named_or_skipped_and_counted(tmp_path, row, said):
    good = {"messages": messages("Fine.")}
    path = write(tmp_path, [good, row, good])
    with pytest.raises(InvalidInputError, match=said):
        read_log(path)
    trace = read_log(path, skip_bad=True)
    assert trace.requests == 2 and any("skipped 1 rows" in note for note in trace.notes)


def test_what_is_no_log_is_refused(tmp_path):
    with pytest.raises(InvalidInputError, match="empty"):
        read_log(write(tmp_path, ["\n"]))
    with pytest.raises(InvalidInputError, match="no request"):
        read_log(write(tmp_path, ["{broken\n"]), skip_bad=True)
    with pytest.raises(UnknownNameError):
        read_log(tmp_path / "absent.jsonl")


# ---------------------------------------------------------------- advice


def test_shared_prompts_are_counted_and_the_tables_figures_are_those_of_their_sources(tmp_path):
    found = advise(shared_log(tmp_path), model="llama-3-8b", hardware="a100", sizes={"disk": [GIB]})
    sharing, trace = found.sharing, found.trace
    assert sharing.requests == 20 and sharing.reused_requests == 19 / 20
    whole = replay(trace, "lru", capacity_chunks=trace.distinct)
    assert sharing.ceiling == whole.hit_rate > 0.85
    assert 0 < sharing.one_off_tokens < 0.1 and sharing.span_s == 19
    device = found.table.to_dicts()[1]
    costs = cost_model("llama-3-8b", "a100")
    want = costs.ttft_seconds(trace.input_tokens, whole.hit_tokens, tier=None)
    assert device["hit_rate"] == pytest.approx(sharing.ceiling)
    assert device["ttft_mean_s"] == pytest.approx(float(np.mean(want)))
    assert "own prefix cache is enough" in found.verdict()


def test_traffic_that_never_repeats_is_not_to_be_cached(tmp_path):
    rng = np.random.default_rng(0)
    rows = [{"prompt": rng.integers(0, 50_000, 2000).tolist()} for _ in range(30)]
    found = advise(write(tmp_path, rows))
    assert found.sharing.ceiling == 0 and found.sharing.one_off_tokens > 0.99
    assert found.verdict().startswith("Do not cache") and "one-off" in found.verdict()


def test_short_prompts_are_not_to_be_cached(tmp_path):
    rows = [{"prompt": list(range(48)) + [1000 + n] * 8} for n in range(50)]
    found = advise(write(tmp_path, rows), hardware="h100")
    assert found.sharing.ceiling > 0.5 and found.sharing.short_requests == 1
    assert found.verdict().startswith("Do not cache") and "shorter than the break-even" in found.verdict()


def crowded():
    """More sessions than the device has room for, long prompts."""
    return chat(sessions=120, turns=6, block_tokens=512)


def test_a_working_set_beyond_the_device_asks_for_a_tier_that_holds_it():
    found = advise(crowded(), model="llama-3-8b", hardware="l4", sizes={"memory": [16 * GIB, 512 * GIB]})
    best, own = found.best, found.table.to_dicts()[1]
    assert best["tier"] == "memory" and best["capacity_bytes"] == 512 * GIB
    assert found.verdict().startswith("Cache in memory with 512 GiB")
    assert best["hit_rate"] == pytest.approx(found.sharing.ceiling) and own["hit_rate"] < 0.5 * best["hit_rate"]
    assert best["ttft_mean_s"] < own["ttft_mean_s"] < found.table["ttft_mean_s"][0]
    assert best["dollars_per_million_tokens"] < found.table["dollars_per_million_tokens"][0]


def test_a_tier_slower_than_computing_is_not_advised_and_never_used_for_a_loss():
    slow = cost_model("llama-3-8b", "h100").with_bandwidth("redis", 1e6)
    found = advise(crowded(), costs=slow, sizes={"redis": [512 * GIB]})
    rows = {row["tier"]: row for row in found.table.to_dicts()}
    assert rows["redis"]["ttft_mean_s"] <= rows["device"]["ttft_mean_s"] * (1 + 1e-9)
    assert found.best["tier"] != "redis"


def test_advice_reads_well_and_names_how_each_figure_came_about(tmp_path):
    found = advise(shared_log(tmp_path))
    text = str(found)
    assert all(word in text for word in ("counted", "simulated", "modelled", "estimated"))
    assert "NaN" not in found.figure(template="dark").to_json()
    assert "simulated" in found.figure().layout.title.subtitle.text
    with pytest.raises(UnknownNameError, match="there are"):
        advise("chat", sizes={"tape": [GIB]})
    with pytest.raises(InvalidInputError, match="above 0"):
        advise("chat", sizes={"disk": [0]})


def test_the_command_line_says_the_same(tmp_path):
    path = shared_log(tmp_path)
    result = CliRunner().invoke(app, ["advise", str(path), "--size", "disk=1", "--json"], catch_exceptions=False)
    row = json.loads(result.stdout)[0]
    want = advise(path, sizes={"disk": [GIB]})
    assert row["verdict"] == want.verdict() and row["tiers"] == want.table.to_dicts()
    shown = CliRunner().invoke(app, ["advise", "chat", "--hardware", "l4"], catch_exceptions=False).stdout
    assert "hit rate" in shown and "(simulated)" in shown and "(modelled)" in shown
    assert "kvworkbench advise" in CliRunner().invoke(app, ["advise", "--help"]).stdout
    with pytest.raises(InvalidInputError, match="memory=64"):
        CliRunner().invoke(app, ["advise", "chat", "--size", "memory"], catch_exceptions=False)


LOGGED_BY_VLLM = """
import os
os.environ["VLLM_LOGGING_LEVEL"] = "DEBUG"
import vllm.logger
from vllm import SamplingParams
from vllm.entrypoints.serve.utils.request_logger import RequestLogger
vllm.logger._configure_vllm_root_logger()
log = RequestLogger(max_log_len=None)
for ids in ([*range(80)], [*range(48), *range(900, 950)]):
    log.log_inputs("cmpl-1", "it's a \\"quoted\\", prompt\\n", ids, None, SamplingParams(max_tokens=3), None)
"""


@pytest.mark.vllm
@pytest.mark.slow
def test_what_vllm_itself_logs_is_read(tmp_path):
    pytest.importorskip("vllm.entrypoints.serve.utils.request_logger", reason="this vLLM logs elsewhere")
    done = subprocess.run(
        [sys.executable, "-c", LOGGED_BY_VLLM], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    trace = read_log(write(tmp_path, [done.stdout + done.stderr], "vllm.log"))
    assert trace.input_tokens.tolist() == [80, 98] and trace.distinct == 8

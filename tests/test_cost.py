"""The cost model: sizes and parameters against published ones, seconds against other roads, the fit against a truth."""

import json
import math

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_run import DOCUMENT_TOKENS, FIXED_SECONDS, SECONDS_PER_TOKEN, synthetic_run

from experiments.cost import CostModel, Efficiency, cost_model, predict
from experiments.cost_calibration import calibrate
from experiments.cost_models import MODELS, resolve_shape
from experiments.cost_shapes import KVShape
from experiments.hardware import HARDWARE, TIERS, Hardware, resolve_hardware
from experiments.lab import NOTEBOOKS
from experiments.plots.break_even import break_even_curve, break_even_data, plot_break_even
from experiments.widgets import CostCalculator
from workbench.errors import InvalidInputError, UnknownNameError

LLAMA = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 1024,
         "vocab_size": 1000}  # fmt: skip

# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize("name", MODELS)
def test_a_config_gives_the_published_number_of_parameters(name):
    assert resolve_shape(name).parameters == pytest.approx(MODELS[name][2], rel=0.01)


def test_experts_count_once_a_token():
    assert resolve_shape("deepseek-v3").active_parameters == pytest.approx(37.5e9, rel=0.02)  # 37 billion published
    assert resolve_shape("jamba-v0.1").active_parameters == pytest.approx(12e9, rel=0.02)


@pytest.mark.parametrize(
    "changes, bytes_per_token",
    [
        ({}, 2 * 4 * 8 * 64 * 2),  # MHA
        ({"num_key_value_heads": 2}, 2 * 4 * 2 * 64 * 2),  # GQA
        ({"num_key_value_heads": 1}, 2 * 4 * 1 * 64 * 2),  # MQA
        ({"multi_query": True}, 2 * 4 * 1 * 64 * 2),  # as Falcon says it
        ({"head_dim": 128}, 2 * 4 * 8 * 128 * 2),
        ({"num_key_value_heads": [8, 4, 2, 1]}, 2 * 15 * 64 * 2),  # each layer its own
        ({"dtype": "float32"}, 2 * 4 * 8 * 64 * 4),
        ({"kv_lora_rank": 96, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64}, 4 * 128 * 2),  # MLA
        ({"num_kv_shared_layers": 1}, 2 * 3 * 8 * 64 * 2),
    ],
)
def test_bytes_per_token_by_hand(changes, bytes_per_token):
    shape = KVShape.from_hf_config(LLAMA | changes)
    assert shape.bytes_per_token == bytes_per_token
    assert shape.kv_bytes(100) == 100 * bytes_per_token


def test_fields_of_older_families():
    gpt2 = KVShape.from_hf_config({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
                                   "vocab_size": 50257, "tie_word_embeddings": True, "n_positions": 1024})  # fmt: skip
    assert gpt2.parameters == pytest.approx(124e6, rel=0.01) and gpt2.max_tokens == 1024
    mpt = KVShape.from_hf_config({"model_type": "mpt", "d_model": 4096, "n_layers": 32, "n_heads": 32,
                                  "vocab_size": 50432, "attn_config": {"kv_n_heads": 8}})  # fmt: skip
    assert mpt.bytes_per_token == 2 * 32 * 8 * 128 * 2
    nested = KVShape.from_hf_config({"text_config": LLAMA, "vision_config": {"hidden_size": 9}, "dtype": "float32"})
    assert nested.hidden == 512 and nested.value_bytes == 4


def test_windows_stop_growing():
    every = KVShape.from_hf_config(LLAMA | {"sliding_window": 256})
    assert every.kv_bytes(256) == every.kv_bytes(10_000) == 256 * every.bytes_per_token
    mixed = KVShape.from_hf_config(LLAMA | {"layer_types": ["sliding_attention", "full_attention"] * 2,
                                            "sliding_window": 256})  # fmt: skip
    assert mixed.kv_bytes(1024) == (256 + 1024) * mixed.bytes_per_token / 2
    gemma = resolve_shape("gemma-3-27b")
    assert sum(layer.window is None for layer in gemma.layers) == 10  # every sixth of 62
    off = KVShape.from_hf_config(LLAMA | {"sliding_window": 256, "use_sliding_window": False})
    assert off.kv_bytes(1000) == 1000 * off.bytes_per_token


def test_states_do_not_grow_and_are_no_prefix():
    jamba = resolve_shape("jamba-v0.1")
    assert sum(layer.cached_values > 0 for layer in jamba.layers) == 4
    assert jamba.kv_bytes(2000) - jamba.kv_bytes(1000) == 1000 * jamba.bytes_per_token == 1000 * 4 * 2 * 8 * 128 * 2
    assert jamba.kv_bytes(1) - jamba.bytes_per_token == jamba.state_bytes == 28 * (3 * 8192 + 8192 * 16) * 2
    mamba = KVShape.from_hf_config({"model_type": "mamba2", "hidden_size": 1024, "num_hidden_layers": 2, "expand": 2,
                                    "num_heads": 32, "head_dim": 64, "state_size": 128, "n_groups": 1,
                                    "vocab_size": 10})  # fmt: skip
    assert mamba.bytes_per_token == 0 and mamba.state_bytes == 2 * 2 * (3 * (2048 + 256) + 2048 * 128)
    qwen = KVShape.from_hf_config(LLAMA | {
        "model_type": "qwen3_next", "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4})  # fmt: skip
    assert qwen.bytes_per_token == 2 * 8 * 64 * 2
    assert qwen.state_bytes == 3 * 2 * (3 * (2 * 256 + 512) + 4 * 128 * 128)


def test_nemotrons_letters_and_quantised_weights():
    shape = KVShape.from_hf_config(LLAMA | {
        "model_type": "nemotron_h", "hybrid_override_pattern": "M-*-", "mamba_num_heads": 8, "mamba_head_dim": 64,
        "ssm_state_size": 16, "n_groups": 1, "quantization_config": {"quant_method": "gptq", "bits": 4}})  # fmt: skip
    assert [bool(layer.cached_values) for layer in shape.layers] == [False, False, True, False]
    assert shape.layers[1].parameters == shape.layers[3].parameters == 2 * 512 * 1024
    assert shape.weight_bytes == shape.parameters / 2 and shape.value_bytes == 2


@pytest.mark.parametrize(
    "config, said",
    [
        ({"vocab_size": 10}, "language model"),
        ({"hidden_size": 8}, "num_hidden_layers"),
        ({"hidden_size": 8, "num_hidden_layers": 2}, "num_attention_heads"),
        (LLAMA | {"layer_types": ["full_attention", "wavelet"]}, "wavelet"),
        ("/no/such/config.json", "cannot be read|can be read"),
    ],
)
def test_what_is_no_config_is_refused(config, said):
    with pytest.raises(InvalidInputError, match=said):
        KVShape.from_hf_config(config)


def test_a_config_is_read_from_a_folder(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}')
    for place in (tmp_path, str(tmp_path / "config.json")):
        assert resolve_shape(place).bytes_per_token == 256
    with pytest.raises(UnknownNameError, match="there are"):
        resolve_shape("llama-9")
    with pytest.raises(InvalidInputError, match="kv_dtype"):
        resolve_shape("llama-3-8b", kv_dtype="int3")


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([None, 3, 50]), st.integers(0, 60), st.integers(1, 60))
def test_attention_counts_every_pair_once(window, start, new):
    config = LLAMA | ({"sliding_window": window} if window else {})
    shape = KVShape.from_hf_config(config)
    pairs = sum(min(token + 1, window or 10**9) for token in range(start, start + new))
    assert shape.work(start, start + new).attention_flops == pytest.approx(pairs * 4 * 2 * 8 * 2 * 64)
    whole, head = shape.work(0, start + new), shape.work(0, 0).matmul_flops
    assert whole.matmul_flops - head == pytest.approx(
        shape.work(0, start).matmul_flops + shape.work(start, start + new).matmul_flops - 2 * head
    )


# ---------------------------------------------------------------- machines and seconds


def test_presets_have_a_source_and_come_in_numbers():
    assert all(one.source and one.flops_per_second > 0 for one in HARDWARE.values())
    assert all(one.source for one in TIERS.values())
    assert resolve_hardware("2xmi300x").memory_bytes == 2 * HARDWARE["mi300x"].memory_bytes
    for wrong in ("h1000", "0xh100", "2xh1000"):
        with pytest.raises(UnknownNameError, match="there are"):
            resolve_hardware(wrong)


def plain(**changes) -> CostModel:
    """A machine of round figures: 1e12 FLOPs, no fixed costs, no latency worth the name."""
    machine = Hardware("plain", 1e12, 1e12, 1e10, 1e9, 3.6, "made up")
    reached = Efficiency(matmul=1, attention=1, memory=math.inf, fixed_s=0.0)
    return CostModel(KVShape.from_hf_config(LLAMA), machine, reached, **changes)


def test_prefill_is_flops_over_speed_and_is_bound_by_reading_where_short():
    costs = plain()
    work = costs.shape.work(100, 400)
    assert costs.prefill_seconds(100, 400) == pytest.approx((work.matmul_flops + work.attention_flops) / 1e12)
    slow = CostModel(costs.shape, costs.hardware, Efficiency(1, 1, 1e-6, 0.0))
    assert slow.prefill_seconds(0, 1) == pytest.approx(slow.shape.work(0, 1).weight_bytes / 1e6)


def test_the_link_bounds_what_a_tier_gives():
    costs = plain()
    assert costs.load_bytes_per_second("memory") == 1e9 and costs.with_bandwidth("memory", 5e9).load_bytes_per_second(
        "memory") == 5e9  # fmt: skip
    assert costs.load_seconds(0) == 0
    assert costs.load_seconds(1000) == pytest.approx(TIERS["memory"].latency_s + costs.shape.kv_bytes(1000) / 1e9)
    for wrong in (0, -1, math.nan):
        with pytest.raises(InvalidInputError, match="above 0"):
            costs.with_bandwidth("memory", wrong)
    with pytest.raises(UnknownNameError, match="there are"):
        costs.load_seconds(5, "tape")


@settings(max_examples=40, deadline=None)
@given(st.floats(1e6, 1e12), st.integers(1, 2000))
def test_break_even_tokens_is_where_saving_begins(bandwidth, new):
    costs = cost_model("smollm2-135m", "l4").with_bandwidth("memory", bandwidth)
    first = costs.break_even_tokens(new_tokens=new, longest=1 << 16)
    if first is None:
        assert costs.saved_seconds(1 << 16, new_tokens=new) <= 0
        return
    assert costs.saved_seconds(first, new_tokens=new) > 0
    assert first == 1 or costs.saved_seconds(first - 1, new_tokens=new) <= 0


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 100_000), st.integers(1, 500))
def test_at_the_break_even_bandwidth_nothing_is_won_or_lost(hit, new):
    costs = plain()
    need = costs.break_even_bandwidth(hit, new_tokens=new)
    exact = costs.with_bandwidth("memory", need)
    latency = TIERS["memory"].latency_s
    assert exact.saved_seconds(hit, new_tokens=new) == pytest.approx(-latency, rel=1e-6)
    assert costs.with_bandwidth("memory", 1.01 * need).saved_seconds(hit, new_tokens=new) > -latency


def test_faster_tiers_pay_sooner_and_slow_ones_never():
    costs = cost_model("llama-3-8b", "h100")
    by_speed = [costs.with_bandwidth("memory", s).break_even_prompt_tokens(0.9) for s in (1e7, 3e9, 2e10, 1e12)]
    assert by_speed[0] is None and by_speed[1] > by_speed[2] > by_speed[3]


def test_mooncakes_bound_on_bandwidth_is_met():
    """FAST'25: LLaMA3-70B on 8 x A100, 8,192 tokens, wants about 6 GB/s.

    Theirs counts the masked half of attention, and 22 d^2 FLOPs a token and layer; this model's matrices take 25.5.
    """
    full = Efficiency(matmul=1, attention=0.5, memory=math.inf, fixed_s=0.0)
    need = cost_model("llama-3-70b", "8xa100", efficiency=full).break_even_bandwidth(8192, new_tokens=1)
    assert need == pytest.approx(5.86e9 * 22 / 25.5, rel=0.05)


@pytest.mark.parametrize("model", ["llama-3-8b", "deepseek-v3"])
def test_the_costs_of_a_replay_are_the_same_model(model):
    costs = cost_model(model, "8xa100", kv_dtype="fp8")
    same = costs.reuse_costs("disk")
    assert same.bytes_per_token == pytest.approx(costs.shape.bytes_per_token)
    head = 2 * costs.shape.hidden * costs.shape.vocab / (costs.hardware.flops_per_second * costs.efficiency.matmul)
    prefill = costs.prefill_seconds(20_000, 60_000) - head
    assert same.recompute_seconds(20_000, 60_000) == pytest.approx(prefill, rel=1e-3)  # pairs are n^2 / 2 there
    assert same.load_seconds(5000) == pytest.approx(costs.load_seconds(5000, "disk") - TIERS["disk"].latency_s)


def test_room_and_money():
    costs = cost_model("llama-3-8b", "h100")
    assert costs.concurrent_requests(8192) == int((0.9 * 80e9 - costs.shape.weight_bytes) // (8192 * 131072))
    assert cost_model("llama-3-70b", "h100").concurrent_requests(1) == 0
    cold = costs.dollars_per_million_tokens(8192)
    assert cold == pytest.approx(costs.prefill_seconds(0, 8192) / 8192 * 1e6 * 3.0 / 3600)
    warm = costs.dollars_per_million_tokens(8192, 0.9)
    assert costs.dollars_per_million_tokens(8192, 0.9, overlapped=True) < warm < cold
    fp8 = cost_model("llama-3-8b", "h100", kv_dtype="fp8")
    assert fp8.shape.bytes_per_token == costs.shape.bytes_per_token / 2
    with pytest.raises(InvalidInputError, match="share"):
        costs.dollars_per_million_tokens(8192, 1.5)
    assert costs.decode_seconds(8192) == pytest.approx(
        (costs.shape.work(0, 1).weight_bytes + costs.shape.kv_bytes(8192)) / (3.35e12 * 0.7))  # fmt: skip


def test_predict_is_one_row_with_and_without_reuse():
    row = predict(model="qwen3-8b", hardware="a100", prompt_tokens=4096, hit_share=0.5, tier="disk")
    costs = cost_model("qwen3-8b", "a100")
    assert row["ttft_s"] == costs.ttft_seconds(4096, 2048, tier="disk") and row["ttft_cold_s"] > row["ttft_s"]
    assert predict(hit_share=0.0)["break_even_bytes_per_second"] is None


# ---------------------------------------------------------------- calibration


def made_requests(costs: CostModel, *, noise: float, seed: int = 0) -> pl.DataFrame:
    """Requests of a machine whose costs are known."""
    rng = np.random.default_rng(seed)
    rows = []
    for arm, new in (("none", None), ("memory", 32)):
        for length in (128, 256, 512, 1024, 2048, 4096):
            for _ in range(5):
                hit = 0 if new is None else length - new
                load = costs.load_seconds(hit, "memory") if hit else 0.0
                ttft = costs.ttft_seconds(length, hit) * rng.lognormal(0, noise)
                rows.append((arm, length, hit, ttft, load, costs.decode_seconds(length)))
    names = ["arm", "prompt_tokens", "cached_tokens", "ttft_s", "load_s", "itl_s"]
    return pl.DataFrame(rows, schema=names, orient="row")


def test_a_fit_finds_the_machine_that_made_the_requests():
    truth = CostModel(resolve_shape("smollm2-135m"), resolve_hardware("epyc_core"),
                      Efficiency(matmul=0.4, attention=0.15, memory=0.5, fixed_s=0.02))  # fmt: skip
    found = calibrate(made_requests(truth, noise=0.0), model="smollm2-135m")
    for name in ("matmul", "attention", "memory", "fixed_s"):
        assert getattr(found.model.efficiency, name) == pytest.approx(getattr(truth.efficiency, name), rel=0.02)
    assert found.held_out.height == 6 and found.largest_error < 0.02 and "6 of 6" in found.verdict()
    assert found.model.ttft_seconds(3000, 2900) == pytest.approx(truth.ttft_seconds(3000, 2900), rel=0.02)
    noisy = calibrate(made_requests(truth, noise=0.1), model="smollm2-135m")
    assert noisy.median_error < 0.1


def test_held_out_cells_are_not_fitted():
    requests = made_requests(plain(), noise=0.05)
    before = calibrate(requests, model=LLAMA)
    assert before.cells.group_by("part").len()["len"].to_list() == [6, 6]
    assert before.held_out.filter(pl.col("cached_tokens") > 0).height == 3
    held = before.held_out.select("arm", pl.col("prompt_tokens").cast(pl.Int64), worse=pl.lit(3.0))
    joined = requests.join(held, on=["arm", "prompt_tokens"], how="left", maintain_order="left")
    after = calibrate(joined.with_columns(pl.col("ttft_s") * pl.col("worse").fill_null(1.0)), model=LLAMA)
    assert after.model.efficiency == before.model.efficiency and after.median_error > 0.5 > before.largest_error
    assert calibrate(requests, model=LLAMA, seed=1).held_out["prompt_tokens"].to_list() != (
        before.held_out["prompt_tokens"].to_list())  # fmt: skip


def test_the_fit_of_a_run_in_the_stores_form():
    """The synthetic run's prefill is linear: a millisecond a token and a fixed part."""
    requests = synthetic_run(groups=8).requests
    found = calibrate(requests, model="smollm2-135m", split=False)
    whole = 420 + DOCUMENT_TOKENS + 40
    assert found.model.ttft_seconds(whole) == pytest.approx(FIXED_SECONDS + whole * SECONDS_PER_TOKEN, rel=0.05)
    assert found.held_out.is_empty() and "measured" in found.model.source


@pytest.mark.parametrize("number, model", [(0, None), (1, "smollm2-135m")], ids=["random llama", "smollm2"])
def test_half_of_real_cells_predicts_the_others_within_twenty_per_cent(number, model):
    """The connector benchmark's requests, measured on a quiet machine; every seed draws other halves."""
    measured = json.loads((NOTEBOOKS / "example_runs" / "calibration.json").read_text())[number]
    config = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 2,
              "intermediate_size": 1536, "vocab_size": 257}  # fmt: skip
    machine = f"{measured['threads']}xepyc_core"
    for seed in range(10):
        found = calibrate(pl.DataFrame(measured["requests"]), model=model or config, hardware=machine, seed=seed)
        assert found.held_out.height >= 6 and found.largest_error < 0.2, seed
        assert found.median_error < 0.1
    assert 0.3 < found.model.efficiency.matmul < 1.3  # of a peak that is itself an estimate


def test_fits_refuse_what_they_cannot_use():
    with pytest.raises(InvalidInputError, match="ttft_s"):
        calibrate(pl.DataFrame({"arm": ["none"], "prompt_tokens": [1], "cached_tokens": [0]}), model="smollm2-135m")
    with pytest.raises(InvalidInputError, match="at least 4"):
        calibrate(made_requests(plain(), noise=0.0).head(10), model="smollm2-135m")


# ---------------------------------------------------------------- plot and panel


def test_the_curve_crosses_where_it_says():
    costs = cost_model("llama-3-8b", "h100")
    data = break_even_curve(costs, tiers=["redis"], hit_share=0.5, longest=1 << 18)
    first = data.filter(pl.col("series") == "redis")["break_even_tokens"][0]
    cold, warm = (data.filter(pl.col("series") == series)["ttft_s"].to_numpy() for series in ("none", "redis"))
    lengths = data.filter(pl.col("series") == "redis")["prompt_tokens"].to_numpy()
    assert (warm[lengths < 0.98 * first] >= cold[lengths < 0.98 * first]).all()
    assert (warm[lengths > 1.02 * first] < cold[lengths > 1.02 * first]).all()
    assert f"pays from {first:,} tokens" in plot_break_even(data).to_json()


def test_points_are_measured_and_lines_are_modelled():
    data = break_even_data(synthetic_run().requests)
    points = data.filter(pl.col("kind") == "measured")
    assert points["n"].sum() == 80 and points["break_even_tokens"].null_count() == points.height
    lines = data.filter(pl.col("kind") == "modelled")
    assert set(lines["series"]) == {"none", "prefix_cache", "memory", "disk"}
    few = break_even_data(synthetic_run(arms=("none",)).requests)
    assert set(few["kind"]) == {"measured"}


def test_the_calculators_break_even_moves_with_its_sliders():
    panel = CostCalculator("llama-3-8b", "a100")
    assert panel._bandwidth.value == pytest.approx(32) and "modelled" in panel.children[0].value
    slow, before = panel.table()["break_even_tokens"][0], panel.chart.spec
    panel._bandwidth.value = 2.0
    assert panel.table()["break_even_tokens"][0] > slow and panel.chart.spec != before
    panel._bandwidth.value = 0.01
    assert panel.table()["break_even_tokens"][0] is None and "does not pay" in panel._summary.value
    panel._tier.value = "disk"
    assert panel._bandwidth.value == pytest.approx(7)
    panel._model.value, panel._prompt.value, panel._share.value = "deepseek-v3", 32768, 0.5
    want = cost_model("deepseek-v3", "a100").with_bandwidth("disk", 7e9)
    assert panel.table()["ttft_s"][0] == pytest.approx(want.ttft_seconds(32768, 16384, tier="disk"))
    assert panel.figure().layout.yaxis.title.text.startswith("time to first token")


def test_a_calibrated_model_can_be_looked_at():
    fitted = calibrate(made_requests(plain(), noise=0.0), model=LLAMA).model
    panel = CostCalculator(costs=fitted)
    assert panel._model.disabled and "measured" in str(panel.figure().layout.title.subtitle.text)
    assert panel._bandwidth.value == pytest.approx(fitted.load_bytes_per_second("memory") / 1e9)


def test_tiers_and_codecs_of_a_study_are_told_apart():
    costs = plain().with_bandwidth("memory", 4e9)
    slow = costs.with_bandwidth("memory", 1e9)
    frames = [made_requests(one, noise=0.0).with_columns(tier=pl.lit(tier), codec=pl.lit("raw"))
              for one, tier in ((costs, "memory"), (slow, "disk"))]  # fmt: skip
    requests = pl.concat(frames).with_columns(pl.col("arm").replace("memory", "cache"))
    found = calibrate(requests, model=LLAMA, split=False)
    assert set(found.cells["arm"]) == {"none", "cache/memory/raw", "cache/disk/raw"}
    speeds = [found.model.tiers[f"cache/{tier}/raw"].bytes_per_second for tier in ("memory", "disk")]
    assert speeds[0] > 2 * speeds[1]


def test_requests_of_a_busy_moment_are_left_out_and_counted():
    truth = CostModel(resolve_shape("smollm2-135m"), resolve_hardware("epyc_core"), Efficiency(0.4, 0.15, 0.5, 0.02))
    rng = np.random.default_rng(0)
    requests = made_requests(truth, noise=0.0)
    busy = pl.Series(np.where(rng.random(requests.height) < 0.4, 4.0, 1.0))
    requests = requests.with_columns(pl.col("ttft_s") * busy, pl.col("itl_s") * busy)
    found = calibrate(requests, model="smollm2-135m")
    assert found.disturbed == (busy > 1).sum() and found.largest_error < 0.05
    assert calibrate(requests, model="smollm2-135m", calm=None).disturbed == 0

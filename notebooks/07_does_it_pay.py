# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Does reuse pay for my traffic?
#
# Give a request log: OpenAI-style JSON lines, a vLLM log, or a trace. From it follow how much is shared (counted), the
# hit rate of each tier (**simulated**), and what that does to time to first token on your hardware (**modelled**). The
# model of this machine is **measured**: fitted to real requests, and judged by those it has not seen.

# %%
import json
import os
from pathlib import Path

import polars as pl

from experiments.advisor import advise
from experiments.cost_calibration import calibrate
from experiments.plots.break_even import break_even_data, plot_break_even
from experiments.provenance import provenance
from experiments.traces import chat, trace_from_frame
from experiments.widgets import CostCalculator

log = os.environ.get("KVWORKBENCH_LOG")  # yours; without one, generated conversations with long turns
model, hardware = "llama-3-8b", "l4"

# %% [markdown]
# ## Advice

# %%
advice = advise(log or chat(sessions=150, block_tokens=512), model=model, hardware=hardware)
print(advice)

# %% [markdown]
# ## Where is the break-even?
# Below it, loading takes longer than computing. It moves with the model's KV, the machine and the tier: try a slower
# tier, a shorter prompt, fp8 KV, or a model with latent attention such as DeepSeek-V3.

# %%
CostCalculator(model, hardware)

# %% [markdown]
# ## Result

# %%
advice.figure()

# %%
print(provenance("simulated"))
advice.table.with_columns((pl.col("capacity_bytes") / 2**30).round(1).alias("GiB"), pl.col(pl.Float64).round(4)).drop(
    "capacity_bytes")  # fmt: skip

# %% [markdown]
# ## How good is the model?
# Fitted to half of the cells of a benchmark on a quiet machine, it predicts the other half.

# %%
measured = json.loads(Path("example_runs/calibration.json").read_text())[1]
fit = calibrate(pl.DataFrame(measured["requests"]), model="smollm2-135m", hardware="2xepyc_core")
print(fit.verdict())
fit.held_out.select("arm", "prompt_tokens", "cached_tokens", "n", "ttft_s", "predicted_s", "error").with_columns(
    pl.col(pl.Float64).round(3))  # fmt: skip

# %%
badge = f"measured on {measured['environment']['cpu']}, {measured['threads']} threads, SmolLM2-135M"
plot_break_even(break_even_data(pl.DataFrame(measured["requests"])), badge=badge)

# %% [markdown]
# ## When not to cache

# %%
never_again = pl.DataFrame({"block_ids": [[4 * n + b for b in range(4)] for n in range(200)], "input_tokens": 2048})
others = {
    "one-off traffic": trace_from_frame(never_again, name="one-off", block_tokens=512),
    "short prompts": chat(sessions=200, turns=1, system_blocks=4, block_tokens=16),
}
for name, trace in others.items():
    print(f"{name}: {advise(trace, model=model, hardware='h100').verdict()}")

# %% [markdown]
# ## What would change my mind
# - **Load**: queueing is not modelled. A busy engine gains more from a hit than this says, because others wait less.
# - **Overlap**: loads that hide behind another request's compute cost nothing; here they are counted in full.
# - **The log's end**: a log of one hour has no reuse from yesterday; the ceiling is that of the log.

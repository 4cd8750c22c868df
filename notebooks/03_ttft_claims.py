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
# # Do the published results about KV reuse hold?
#
# "TTFT falls by 68 %", "three to five times the throughput", "chunk size 128 costs six points of hit rate": each such
# number was found on some model and machine. Here each is run again, scaled down to this machine, on real vLLM, and gets
# a verdict by a fixed rule. Runs are **measured**; figures for the original hardware come from a cost model and are
# **modelled**; traces through policies are **simulated**.

# %%
import os
from pathlib import Path

import polars as pl

from experiments.claims import claims_table, load_measured, run_claims
from experiments.claims_list import CLAIMS
from experiments.claims_plot import claims_data, plot_claims
from experiments.claims_runs import Bench
from experiments.provenance import provenance
from experiments.runs import Run

runs = Path(os.environ.get("KVWORKBENCH_RUNS", "runs"))
bench = Bench(os.environ.get("KVWORKBENCH_MODEL", "smollm2"), os.environ.get("KVWORKBENCH_SIZE", "quick"), runs=runs)
testable = sum(claim.measure is not None for claim in CLAIMS)
print(f"{len(CLAIMS)} claims, {testable} of them can be run here; serving {bench.model.name}")

# %% [markdown]
# ## One of them, now
# A batch of questions behind one long prefix: published are 3 to 5 times the throughput. Every other claim runs the same
# way, by name; what was measured before is kept and shown below.

# %%
(found,) = run_claims(["same_prefix_throughput"], bench)
print(f"{found.seconds:.0f} s: {found.figures or found.error}")

# %%
run = Run(runs / found.runs[-1])
run.requests.select("request_id", "arm", "prompt_tokens", "cached_tokens", "ttft_s", "e2e_s").head(8)

# %% [markdown]
# ## Result
# A point in the bar: reproduced. Beyond it, on the same side: reproduced in shape. Where measured and modelled disagree,
# the difference is loading: a copy in memory here, PCIe there.

# %%
plot_claims(claims_data(CLAIMS, load_measured(runs)))

# %%
print(provenance("measured"))
table = claims_table(runs=runs)
table.group_by("verdict").len("claims").sort("claims", descending=True)

# %%
with pl.Config(tbl_rows=50, fmt_str_lengths=60):
    print(table.select("claim", "published", "measured", "modelled", "verdict"))

# %% [markdown]
# ## What would change my mind
# - **Another model or machine**: `run_claims(bench=Bench("meta-llama/Llama-3.1-8B", "full"))` on a GPU is the same call.
# - **Many requests at once**: here one runs at a time; queueing moves TTFT more than anything else.
# - **The rule**: "in shape" asks for the same direction and half of the size; `verdict_of` has it in ten lines.

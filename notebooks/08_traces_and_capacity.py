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
# # How much cache does this traffic pay for?
#
# A trace says which blocks each request looked up. From it follow the working set, the hit rate at every capacity, and
# the capacity beyond which more memory buys nothing. Everything here is **simulated** from a trace: a generated one,
# unless you name a recorded one.

# %%
import os

import polars as pl

from experiments.capacity import capacity_table, plot_capacity
from experiments.curves import chunk_size_sweep, lru_curve
from experiments.policy_comparison import GENERATED_TRACES, available_traces
from experiments.provenance import provenance
from experiments.traces import load_trace
from experiments.widgets import PolicyLab

name = os.environ.get("KVWORKBENCH_TRACE", "chat")
bytes_per_token = 131_072  # Llama-3.1-8B in bfloat16
print("available here:", ", ".join(available_traces()))

# %% [markdown]
# ## The trace

# %%
trace = GENERATED_TRACES[name]() if name in GENERATED_TRACES else load_trace(name)
gib_per_chunk = trace.block_tokens * bytes_per_token / 2**30
print(trace)
print(f"working set: {trace.distinct * gib_per_chunk:.1f} GiB of KV; longest request: {trace.lengths.max()} blocks")

# %% [markdown]
# ## Every capacity in one pass
# Prefix LRU has a stack, so one pass counts the hits of all capacities exactly.

# %%
curve = lru_curve(trace)
knee = curve.knee()
print(f"{curve.accesses:,} lookups in {curve.seconds * 1e3:.0f} ms of CPU time")
print(f"the knee lies at {knee * gib_per_chunk:.1f} GiB with {float(curve.hit_rate(knee)):.1%} of chunks hit")

# %% [markdown]
# ## Does the order of eviction matter here?
# Press *Run* to see how far other policies are from LRU, and from one that knows the future.

# %%
PolicyLab("sieve", rivals=["lru", "arc", "slru"], trace=name, seeds=3, bytes_per_token=bytes_per_token)

# %% [markdown]
# ## Result

# %%
plot_capacity(curve, bytes_per_token=bytes_per_token)

# %%
print(provenance("simulated"))
capacity_table(curve, bytes_per_token=bytes_per_token).with_columns(pl.col(pl.Float64).round(3))

# %%
sizes = [1, 2, 4, 8, 16]
chunk_size_sweep(trace, blocks_per_chunk=sizes).select("chunk_tokens", pl.col("hit_rate").round(3))

# %% [markdown]
# ## What would change my mind
# - **Another trace**: `KVWORKBENCH_TRACE=mooncake_conversation`, or `load_trace("mine.jsonl")` for your own log.
# - **Time**: a trace is a sample of some hours; the knee of a quiet morning is not that of a full day.
# - **The size of KV**: `bytes_per_token` is the model's; half of it with fp8 moves every capacity by two.

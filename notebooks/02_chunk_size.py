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
# # How many tokens should a chunk hold?
#
# KV is stored in chunks. Where only whole ones are found again, a large chunk loses the tokens behind the last border of
# what two prompts share, and a small one costs more keys, records and loads. This engine also takes the beginning of a
# chunk, to the token, so the size should no longer matter to the hit rate. First whole chunks, **simulated** over
# conversations; then real vLLM both ways, **measured** on this machine.

# %%
import os
from pathlib import Path

import polars as pl

from experiments.provenance import provenance
from experiments.study import Study
from experiments.widgets import SweepPanel

quick = os.environ.get("KVWORKBENCH_SIZE", "quick") == "quick"  # "full" for longer prompts and more repeats
runs = Path(os.environ.get("KVWORKBENCH_RUNS", "../runs"))

# %% [markdown]
# ## Conversations through chunks of every size
# The room is the same number of tokens for each size. Press *Run*, or let the next cell do it; the sweep goes on if the
# kernel is restarted, and `SweepPanel.attach(...)` finds it again.

# %%
study = Study("chunk-size", kind="replay", repeats=3 if quick else 10, runs=runs,
              space={"chunk_tokens": [16, 32, 64, 128, 256, 512], "policy": ["lru", "s3fifo", "optimal"]},
              fixed={"trace": "chat", "trace.block_tokens": 16, "capacity_tokens": 20_000})  # fmt: skip
panel = SweepPanel(study)
panel

# %%
study.start()
print(study.wait().state)

# %% [markdown]
# ## Result: tokens that a chunk's size loses where only whole ones hit

# %%
panel.figure()

# %%
print(provenance("simulated"))
found = study.frame().group_by("policy", "chunk_tokens").agg(pl.col("hit_rate").mean())
found.sort("chunk_tokens").pivot("chunk_tokens", index="policy", values="hit_rate").with_columns(
    pl.col(pl.Float64).round(3)
)

# %% [markdown]
# ## The same question to real vLLM
# Two questions on each document, an engine for each size of a chunk, with whole chunks alone and with hits to the token;
# vLLM's own blocks have 128 tokens here.

# %%
real = Study("chunk-size-real", kind="serving", runs=runs,
             space={"chunk_tokens": [128, 512] if quick else [128, 256, 512, 1024],
                    "cache.partial_hits": [False, True]},
             fixed={"model": "smollm2", "workload": "long_document", "workload.documents_per_group": 1,
                    "workload.groups": 5, "workload.document_tokens": 950 if quick else 3000,
                    "workload.max_tokens": 4}, repeats=1 if quick else 3)  # fmt: skip
SweepPanel(real)

# %%
real.start()
print(real.wait().state)

# %% [markdown]
# ## Result: what was measured
# `hit_rate_bound` is the most that could hit, in whole chunks of this size or to the token; repeated prompts are the
# warm ones.

# %%
print(provenance("measured"))
columns = ["cache.partial_hits", "chunk_tokens", "hit_rate", "hit_rate_bound", "ttft_cold_s", "ttft_warm_s", "error"]
real.frame().sort(columns[:2]).select(columns).with_columns(pl.col(pl.Float64).round(4))

# %% [markdown]
# ## What would change my mind
# - **Your own traffic**: `"trace": "mooncake_conversation"` or a file. Where prompts share whole documents the size
#   hardly matters even to whole chunks; where they share short beginnings it decides.
# - **A slow tier**: a record of a remote tier costs a round trip whatever its size, so larger chunks pay there; add
#   `"tier": ["memory", "disk"]` to the space.
# - **A block of another size**: a chunk is a whole number of vLLM's blocks. On a GPU those have 16 tokens.

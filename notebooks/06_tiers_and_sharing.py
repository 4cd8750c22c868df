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
# # Does one engine's work help another?
#
# Several engines can keep their KV in one Redis: what one has computed, the others load. Here two real vLLM engines in
# two processes share a real `redis-server`, which is started for this notebook. Everything below is **measured** on this
# machine, with Redis on the same machine, so the network costs next to nothing.

# %%
import os
from pathlib import Path

import polars as pl
from transformers import AutoTokenizer

from experiments import resolve_model
from experiments.plots.ttft import plot_ttft, ttft_data
from experiments.provenance import provenance
from experiments.sharing import share
from experiments.widgets import CacheExplorer
from experiments.workloads import make_workload

quick = os.environ.get("KVWORKBENCH_SIZE", "quick") == "quick"  # "full" for longer documents
model = resolve_model(os.environ.get("KVWORKBENCH_MODEL", "smollm2"))

# %% [markdown]
# ## Three questions on each document
# Engine A answers the first one, and computes. Engine B answers the second one: it has never seen the document. Then
# engine B answers the third one.

# %%
tokenizer = AutoTokenizer.from_pretrained(str(model.path))
workload = make_workload("long_document", tokenizer, groups=5, documents_per_group=1, questions=3, max_tokens=4,
                         document_tokens=800 if quick else 3000)  # fmt: skip
print(workload.description)

# %%
run = share(model, workload, tier="redis", runs=Path(os.environ.get("KVWORKBENCH_RUNS", "../runs")))

# %% [markdown]
# ## What engine B saw
# Choose a request: each chunk is a hit in a tier, or a miss with its reason. Chunks found in Redis are kept in B's own
# memory, so the next question needs no network.

# %%
explorer = CacheExplorer(run.folder / "events-b.jsonl")
explorer

# %% [markdown]
# ## Result

# %%
plot_ttft(ttft_data(run.requests))

# %%
print(provenance("measured"))
run.requests.group_by("arm_label", maintain_order=True).agg(
    n=pl.len(), ttft_median_ms=(pl.col("ttft_s").median() * 1e3).round(1), load_ms=(pl.col("load_s").median() * 1e3).round(1),
    cached_tokens=pl.col("cached_tokens").sum(), prompt_tokens=pl.col("prompt_tokens").sum(),
)  # fmt: skip

# %%
explorer.figure()

# %%
loads = run.events.filter(pl.col("kind") == "load", pl.col("reason") == "")
loads.group_by("arm", "tier").agg(chunks=pl.len(), mib=(pl.col("nbytes").sum() / 2**20).round(1))

# %% [markdown]
# ## What would change my mind
# - **A real network**: a link of 1 Gbit/s moves 120 MB/s; at 22.5 KiB a token that is 5,000 tokens a second, to be
#   compared with what prefill does. A codec (`codec="int8"`) halves the bytes.
# - **A larger model**: prefill costs more for each token, and so does loading; `07_does_it_pay` compares the two.
# - **Engines that differ**: another dtype, another quantisation or another number of ranks is another key. Such engines
#   find nothing of one another, on purpose.
# - **Whom do you trust?** Everybody who can write to the server can plant KV, unless `KVWORKBENCH_MAC_KEY` is set.

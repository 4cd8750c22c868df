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
# # Does reused KV make real vLLM answer sooner?
#
# A prompt's KV cache is the same whenever the prompt begins in the same way. Here real vLLM answers questions about
# documents twice: once computing everything, once loading what an earlier question left behind. Everything below is
# **measured** on this machine, one request at a time.

# %%
import os
from pathlib import Path

from experiments import EngineProcess, compare, long_document, resolve_model, summary_table
from experiments.provenance import provenance

quick = os.environ.get("KVWORKBENCH_SIZE", "quick") == "quick"  # "full" for longer documents
model = resolve_model(os.environ.get("KVWORKBENCH_MODEL", "smollm2"))
print(f"{model.name}, {model.licence}, {model.bytes_per_token / 1024:.1f} KiB of KV a token")

# %% [markdown]
# ## The question, as requests
# Real text, a shared system prompt, two questions on each document. The workload itself says how many tokens could be
# reused at most.

# %%
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(str(model.path))
workload = long_document(tokenizer, groups=5, documents_per_group=1, document_tokens=800 if quick else 3000,
                         questions=2, max_tokens=8)  # fmt: skip
print(workload.description)
prompt_tokens = sum(len(request.token_ids) for request in workload.requests)
print("reusable at most:", workload.upper_bound_hit_tokens(1).sum(), "of", prompt_tokens, "prompt tokens")

# %% [markdown]
# ## Run it, without and with reuse

# %%
arms = ["none", "prefix_cache", "memory"]
run = compare(model, workload, arms=arms, name="quickstart", runs=Path(os.environ.get("KVWORKBENCH_RUNS", "runs")))

# %% [markdown]
# ## Result
# Asked a second time about the same document, the engine loads what it stored; answers are compared token by token.

# %%
print(provenance("measured"))
columns = ["arm_label", "phase", "n", "ttft_median_s", "hit_tokens", "equal_none", "compared_none"]
summary_table(run.requests, run.events).select(columns)

# %%
run.plot("ttft")

# %% [markdown]
# ## One engine, by hand
# Any settings of the cache are keywords here; the same ones go into vLLM's `kv_connector_extra_config`.

# %%
prompt = workload.requests[0].token_ids
cache = {"memory_bytes": "512MiB", "chunk_tokens": 256}
room = {"max_model_len": 6144, "kv_cache_memory_bytes": 8192 * model.bytes_per_token}
with EngineProcess(str(model.path), cache=cache, vllm=room) as engine:
    for turn in ("cold", "warm"):
        answer = engine.generate(prompt, max_tokens=12)
        print(f"{turn}: first token after {answer['ttft_s'] * 1e3:7.1f} ms, {answer['cached_tokens']:5d} tokens reused")

# %% [markdown]
# ## What would change my mind
# - **Short prompts**: a short prefill takes hardly longer than a load; try `document_tokens=100`.
# - **vLLM's own prefix cache is enough** as long as everything fits in its memory and it is never restarted: compare
#   the arms `prefix_cache` and `memory` above.
# - **A small model on a fast machine**: loading costs bytes over bandwidth, prefill costs compute; reuse pays where the
#   first is smaller.

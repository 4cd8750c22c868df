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
# # What becomes of a prompt's KV?
#
# A prompt's KV is cut into chunks. Each chunk is named by all the tokens before it, so the next prompt finds whatever
# it has in common with an earlier one. Here one engine, without a model, stores, finds, evicts and reloads chunks, and
# tells what it did. Hits, bytes and evictions are **measured** in that engine; the KV itself is random numbers.

# %%
import tempfile

import numpy as np

from experiments.provenance import provenance
from experiments.widgets import CacheExplorer
from kernels.pages import PageTable
from workbench import CacheEngine, Identity, KVLayout

layout = KVLayout(num_layers=4, num_kv_heads=2, head_size=64, block_size=16, chunk_tokens=64)
print(f"a chunk: {layout.chunk_tokens} tokens in {layout.blocks_per_chunk} blocks, {layout.chunk_nbytes // 1024} KiB")

# %% [markdown]
# ## An engine over a paged cache
# The pages stand for vLLM's KV cache. The engine gets room for 12 chunks in memory and a disk below it.

# %%
rng = np.random.default_rng(0)
arrays = [rng.integers(0, 256, (128, layout.page_nbytes), np.uint8) for _ in range(layout.num_layers)]
pages = PageTable(arrays)
folder = tempfile.TemporaryDirectory()
engine = CacheEngine(
    Identity(layout=layout, weights="example"), memory_bytes=12 * layout.chunk_nbytes, disk_path=folder.name
)
for tier in engine.tiers():
    print(f"{tier.name}: room for {tier.capacity_bytes // layout.chunk_nbytes:,} chunks")

# %% [markdown]
# ## Store, and get it back somewhere else

# %%
document = rng.integers(0, 32_000, 480)
first = np.concatenate([document, rng.integers(0, 32_000, 60)])
there, elsewhere = list(range(40)), list(range(64, 104))
stored = engine.store(first, pages, blocks=there)
loaded = engine.retrieve(first, pages, blocks=elsewhere)
blocks = loaded // layout.block_size
same = all(np.array_equal(a[there[:blocks]], a[elsewhere[:blocks]]) for a in arrays)
print(f"of {len(first)} tokens {stored} stored, {loaded} loaded elsewhere, equal to the byte: {same}")

# %% [markdown]
# ## A prompt that shares a part
# It has the document's 480 tokens in common with the first one: seven chunks of 64 and half of the eighth. The hit ends
# where the prompts part.

# %%
second = np.concatenate([document, rng.integers(0, 32_000, 100)])
print(engine.explain(second))
print(f"{engine.retrieve(second, pages, blocks=elsewhere)} tokens loaded")

# %% [markdown]
# ## More prompts than memory holds
# Chunks leave memory, the last of a prompt first, and stay on disk. The first prompt is then found in two tiers.

# %%
for _ in range(2):
    engine.store(rng.integers(0, 32_000, 300), pages, blocks=there)
engine.flush()
print(engine.explain(first), "| tiers:", engine.explain(first).hit_tiers)
print(f"{engine.retrieve(first, pages, blocks=elsewhere)} tokens loaded")

# %% [markdown]
# ## Look around
# Choose a request to see its chunks. *Follow* keeps reading while the engine is used from another cell.

# %%
explorer = CacheExplorer(engine)
explorer

# %% [markdown]
# ## Result

# %%
explorer.figure()

# %%
print(provenance("measured"))
explorer.state.tiers()

# %% [markdown]
# ## What would change my mind
# - **Whole chunks alone**, as other caches have them, lose the tokens behind the last border: give the engine
#   `partial_hits=False` and run everything again.
# - **Another identity** finds nothing, on purpose: change `weights="example"` and the same tokens are other chunks.
# - **Without the disk** what was evicted is gone: leave `disk_path` out and look at the reason of each miss.

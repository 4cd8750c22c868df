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
# # How small can the KV be before the answers change?
#
# A prefix of real text goes through a codec, chunk by chunk, and a real model goes on from what comes back. Compared
# with the uncompressed prefix: the divergence of its next-token distributions (KL), how often the most likely token is
# another, after how many tokens greedy answers part, and whether hidden needles and key-value pairs are still found.
# Sizes are stored bytes, headers included; speeds are CPU time of one thread. All of it is **measured**.

# %%
import os

import polars as pl

from experiments.codec_links import CodecLinks
from experiments.codec_table import SECOND_TABLE, CodecTable, measure_codec_table
from experiments.compression_claims import compression_claims
from experiments.plots.codec_pareto import codec_pareto_data, plot_codec_pareto
from experiments.plots.ttft_by_bandwidth import plot_ttft_by_bandwidth, ttft_by_bandwidth_data
from experiments.provenance import provenance
from workbench.testing_codecs import check_codec

model = os.environ.get("KVWORKBENCH_MODEL", "smollm2")
full = os.environ.get("KVWORKBENCH_SIZE", "quick") == "full"

# %% [markdown]
# ## A codec is held to its contract
# Round trips in every page format, sizes, damaged data, NaN and infinity: the same suite for a class of your own.

# %%
check_codec("echo(step=0.3)")

# %% [markdown]
# ## Measure some here
# `echo` is ECSQ that foretells each token from an earlier one like it: half the tokens of a text have occurred within
# the chunk. With `focus=0` both give the same numbers back, and so the same KL; `focus` rounds finer where keys are loud.

# %%
codecs = ["int8", "int4", "ecsq(step=0.45, rope_theta=None)", "echo(focus=0)", "echo"]
sizes = {"texts": 5, "prefix_tokens": 1024, "scored_tokens": 256} if full else {
    "texts": 1, "prefix_tokens": 512, "scored_tokens": 64}  # fmt: skip
here = measure_codec_table(model, codecs, **sizes)
print(here.badge)
here.frame().select("codec", "times_smaller", "kl", "kl_interval", "greedy_tokens", "needle_recall", "decode_gb_per_s")

# %% [markdown]
# ## Every codec, on two models
# The first table is of SmolLM2-135M-Instruct, the second of Qwen2.5-Coder-0.5B-Instruct, whose keys have a few loud
# channels. They were measured with `kvworkbench codecs measure --out codecs.json` and `... --model qwen2.5-coder`;
# `--also tasks,calibrated,references` says what besides. Name your own files to see them. `kvtc` alone was calibrated: on
# reference prose, and it is scored on prose and on source code. `quantized_cache` is transformers' cache
# of quanto's or HQQ's integers, `kvpress` leaves out tokens; both are other libraries' and stand here as references.

# %%
tables = [CodecTable.load(), CodecTable.load(SECOND_TABLE)] if not full else [measure_codec_table(model)]
shown = [
    "codec",
    "times_smaller",
    "kl",
    "kl_interval",
    "top1_agreement",
    "greedy_tokens",
    "needle_recall",
    "key_value_recall",
]
for table in tables:
    rows = table.frame()
    print(table.badge)
    with pl.Config(tbl_rows=60, fmt_str_lengths=60, tbl_cols=10, float_precision=4):
        print(rows.select(name for name in shown if rows[name].count()))

# %% [markdown]
# ## Result
# Down and to the left is better. A filled mark is one that no other beats in both; a cross is another library's method.

# %%
print(provenance("measured"))
plot_codec_pareto(codec_pareto_data(tables[0].frame()), badge=tables[0].badge)

# %%
plot_codec_pareto(codec_pareto_data(tables[-1].frame()), badge=tables[-1].badge)

# %% [markdown]
# ### Behind a network
# Time to first token under real vLLM, the KV in Redis behind a link of a chosen bandwidth (`kvworkbench codecs links`).

# %%
links = CodecLinks.load()
plot_ttft_by_bandwidth(ttft_by_bandwidth_data(links.frame), badge=links.badge)

# %% [markdown]
# ### What was published, and what it is here

# %%
for table in tables:
    print(table.badge)
    with pl.Config(tbl_rows=40, fmt_str_lengths=70, tbl_width_chars=160):
        print(compression_claims(table).select("source", "says", "published", "measured", "verdict"))

# %% [markdown]
# ## What would change my mind
# Two models of less than a billion parameters and a few texts: larger models bear fewer bits. A codec that is good on one
# model can fail on another: read both tables. A text in which no token recurs gives `echo` nothing. KL within each
# other's intervals is no order, and a recall of 20 questions moves by 5 points with one of them.

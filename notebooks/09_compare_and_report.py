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
# # What did the change do, and why is it not faster?
#
# Two stored runs of real vLLM, side by side: the settings that differ, the same requests in pairs, and for each arm
# what stands between its hits and its time to first token. Every figure was **measured** when the runs were made. Your
# own runs are shown as soon as there are two; until then two examples stand in.

# %%
import os
import tempfile
from pathlib import Path

import polars as pl

from experiments.explain_run import explain_run
from experiments.export import export_run
from experiments.paired import paired_difference, plot_paired_difference, settings_difference
from experiments.provenance import provenance
from experiments.report import machine_badge
from experiments.runs import list_runs
from experiments.widgets import ExplainCard, RunBrowser

own = Path(os.environ.get("KVWORKBENCH_RUNS", "../runs"))  # where `kvworkbench demo` puts them
store = own if len(list_runs(own)) > 1 else Path("example_runs")
runs = list_runs(store)
print(f"{len(runs)} runs in {store}/; `kvworkbench demo --quick` makes one of your own")

# %% [markdown]
# ## Choose two

# %%
RunBrowser(store)

# %% [markdown]
# ## Why did time to first token not fall?

# %%
first, second = runs[-2:]
ExplainCard(second)

# %%
print(explain_run(second))

# %% [markdown]
# ## Result

# %%
difference = paired_difference(first, second)
plot_paired_difference(difference, badge=machine_badge(second.environment))

# %%
print(f"compared by: {provenance('measured')}")
difference.with_columns(pl.col(pl.Float64).round_sig_figs(3))

# %%
settings_difference(first, second)

# %% [markdown]
# ## Take it along
# The report of a run is one page that opens anywhere; Parquet and CSV hold every request.

# %%
with tempfile.TemporaryDirectory() as folder:
    for suffix in (".parquet", ".csv"):
        path = export_run(second, Path(folder, second.run_id + suffix))
        print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")

# %% [markdown]
# ## What would change my mind
# - **More requests**: a pair is one prompt; an interval that holds 1 shows no difference, and more prompts narrow it.
# - **The same machine, at rest**: the table of settings says whether the machine differed; it cannot say what else ran.
# - **Another length**: what does not pay at 1,000 tokens may pay at 10,000, where prefill costs more than loading.

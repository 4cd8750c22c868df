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
# # Do published hit rates come out again?
#
# Each table was printed somewhere, for a public trace. Here the trace is replayed, and the printed value stands beside
# ours with the number of digits that agree. Everything is **simulated**: no model runs. A trace that is not on this
# machine is named, with where to get it (`kvworkbench traces`).

# %%
import polars as pl

from experiments.plots.published_values import plot_published_values, published_values_data
from experiments.provenance import provenance
from experiments.tables import TABLES, reproduce
from workbench.errors import InvalidInputError

print(provenance("simulated"))
print("tables:", ", ".join(TABLES))

# %% [markdown]
# ## Result: how many values agree in every digit

# %%
tables, rows = {}, []
for name in ("kvcache_simulator", "libcachesim", "llmtrafficlens", "mooncake_figure9", "mooncake_table1"):
    try:
        tables[name] = reproduce(name)
    except InvalidInputError as error:
        rows.append((name, 0, None, None, str(error)))
        continue
    table = tables[name]
    equal = (table["agreeing_digits"] == table["digits"]).sum()
    rows.append((name, len(table), equal, table["gap"].abs().max(), ""))
plot_published_values(published_values_data(tables), badge=provenance("simulated"))

# %%
pl.DataFrame(rows, ["table", "values", "equal", "worst_gap", "missing"], orient="row")

# %% [markdown]
# ## Value by value
# LRU, FIFO and OPTIMAL of `kvcache-simulator`: hit rate by tokens over the second half of the requests.

# %%
tables.get("kvcache_simulator", pl.DataFrame())

# %% [markdown]
# ## Where it does not come out
# Table 1 of the Mooncake paper (arXiv 2407.00079): its trace was never published, and neither public trace gives 0.51.
# Policies that draw at random or keep sketches (LHD, Hyperbolic, W-TinyLFU) are near, not equal.

# %%
tables.get("mooncake_table1", pl.DataFrame())

# %%
if "libcachesim" in tables:
    worst = pl.col("gap").abs().max().alias("worst_gap")
    print(tables["libcachesim"].group_by("what").agg(pl.len().alias("values"), worst).sort("worst_gap"))

# %% [markdown]
# ## What would change my mind
# - **Run the peers yourself**: `reproduce("kvcache_simulator", live=True)` and `reproduce("libcachesim", live=True)` run
#   the packages now, if they are installed, instead of taking what they once gave.
# - **Another definition**: hit rate by tokens or chunks, all requests or the second half, blocks touched head or tail
#   first. Each moves a value by more than many published differences between policies.

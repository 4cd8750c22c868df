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
# # Is my eviction policy better than LRU?
#
# Write a class, and the lab holds it to the contract of a policy, replays it at every capacity beside the others, and
# says how far ahead it is and how sure that is. The same class runs compiled in the replay and live in the engine.
# Everything here is **simulated**: traces through policies, no model.

# %%
import os

from experiments.policy_comparison import PolicyComparison
from experiments.provenance import provenance
from experiments.widgets import PolicyLab
from workbench.policies import policy

quick = os.environ.get("KVWORKBENCH_SIZE", "quick") == "quick"  # "full" for more seeds
seeds = 4 if quick else 20

# %% [markdown]
# ## The policy
# `touch` hears of each use, `score` says what a chunk is worth; the least worthy chunk without children goes first.
# With `worth=0` this is LRU. Change a line and run the cell again.


# %%
@policy
class SecondUse:
    """LRU that keeps a chunk longer for each further use, up to three."""

    fields = {"uses": "i4", "used": "f8"}
    scalars = {"worth": 100.0}  # requests

    def touch(self, c):
        self.uses[c] += 1
        self.used[c] = self.request

    def score(self, c):
        return self.used[c] + self.worth * min(self.uses[c] - 1, 3)


# %% [markdown]
# ## The lab
# Press *Run*, or let the next cell do it.

# %%
lab = PolicyLab(SecondUse, rivals=["lru", "arc", "s3fifo"], trace="rag", seeds=seeds)
lab

# %%
lab.run()
print(lab.verdict())

# %% [markdown]
# ## Result

# %%
lab.figure()

# %%
print(provenance("simulated"))
lab.table()

# %% [markdown]
# ## The same class where it does not belong
# A policy is as good as the workload it was made for. Conversations grow and then end: what was used most is soon dead.

# %%
for trace in ("rag", "chat", "agent"):
    print(PolicyComparison(SecondUse, rivals=["lru"], trace=trace, seeds=seeds).run().verdict())

# %% [markdown]
# ## What would change my mind
# - **Your own trace**: `trace="mooncake_conversation"` or a path. One recorded trace is cut into 20 parts; the interval
#   then says how even the difference is within it, not between traces.
# - **Touch order**: the replay tells a policy of a request's chunks tail first, as vLLM does. Head first ranks policies
#   differently.
# - **Hit rate is not time**: a hit far down a long prompt saves more prefill than one at its start.
# - **A real engine**: `lab.export()` writes the class into a file; `policy="seconduse.py:SecondUse"` serves with it.

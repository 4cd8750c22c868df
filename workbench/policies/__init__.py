"""Eviction policies, one file each. A policy is written once and runs compiled in replay and live in the engine.

from workbench.policies import policy, resolve_policy, policy_names
"""

from workbench.policies.base import form_of, policy
from workbench.policies.names import policy_names, resolve_policy, save_policy

__all__ = ["form_of", "policy", "policy_names", "resolve_policy", "save_policy"]

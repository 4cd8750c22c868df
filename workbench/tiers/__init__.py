"""Tiers: one file a medium."""

from workbench.tiers.base import StoredChunk, Tier, TierIndex

__all__ = ["StoredChunk", "Tier", "TierIndex"]

"""Sizes of BERT that a config names; imports no torch."""

from __future__ import annotations

__all__ = ["SIZES"]

# layers, hidden, heads; feed-forward is 4 × hidden. Source: arXiv 1908.08962 (tiny, mini), 1810.04805.
SIZES = {"tiny": (2, 128, 2), "mini": (4, 256, 4), "base": (12, 768, 12), "large": (24, 1024, 16)}

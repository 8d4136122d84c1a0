"""Trusted reference implementations in plain PyTorch, and the tolerance for each dtype."""

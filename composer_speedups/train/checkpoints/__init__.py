"""Checkpoints: written atomically, read without executing their contents, and found again after an interruption."""

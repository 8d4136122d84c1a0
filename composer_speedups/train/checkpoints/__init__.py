"""Checkpoints: written whole or not at all, read without running anything in them, and found again after a stop."""

"""Measure which techniques make a run fast on this machine; see ``python -m composer_speedups.tune --help``."""

"""Which techniques make a run fast on this machine, measured; see ``python -m composer_speedups.tune --help``."""

"""Train configs with several seeds, and report the spread; see ``python -m composer_speedups.repeat --help``."""

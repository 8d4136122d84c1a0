"""Create a Weights & Biases workspace that compares runs: ``python -m composer_speedups.dashboards``."""

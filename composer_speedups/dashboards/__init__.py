"""Create a Weights & Biases workspace or report that compares runs: ``python -m composer_speedups.dashboards``."""

from composer_speedups.dashboards.layout import Chart, Section, as_text, layout

__all__ = ["Chart", "Section", "as_text", "layout"]

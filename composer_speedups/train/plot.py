"""Samples/s over a run as a picture, with warm-up and evaluations marked."""

from __future__ import annotations

import io
from pathlib import Path

from matplotlib.figure import Figure

from composer_speedups.callbacks.throughput import ThroughputMonitor
from composer_speedups.core.files import write_atomically

__all__ = ["plot_throughput"]


def plot_throughput(monitor: ThroughputMonitor, title: str, path: Path, *, world: int = 1) -> None:
    """Draw the rate of every batch and its moving average, and write a PNG.

    Args:
        monitor: After ``fit``.
        title: Of the picture.
        path: The PNG.
        world: Ranks that trained; each batch's rate is multiplied by it.
    """
    batches = monitor.batches
    index = [b.index for b in batches]
    rates = [world * b.samples / b.seconds for b in batches]
    figure = Figure(figsize=(9, 4), dpi=120, layout="constrained")
    axes = figure.subplots()
    axes.plot(index, rates, color="tab:blue", alpha=0.35, linewidth=0.8, label="each batch")
    window = min(monitor.window, max(1, len(batches) // 4))
    smooth = []
    for i in range(len(batches)):
        recent = batches[max(0, i - window + 1) : i + 1]
        smooth.append(world * sum(b.samples for b in recent) / sum(b.seconds for b in recent))
    axes.plot(index, smooth, color="tab:blue", linewidth=1.8, label=f"mean of {window} batches")
    steady = monitor.summary().get("samples_per_sec")
    if steady:
        axes.axhline(steady, color="black", linewidth=0.8, linestyle=":", label=f"steady state: {steady:,.0f}/s")
    for i, mark in enumerate(monitor.eval_marks):
        axes.axvline(mark, color="tab:orange", linewidth=1.2, label="evaluation" if i == 0 else None)
    unsteady = [b.index for b in batches if not b.steady]
    for i, batch in enumerate(unsteady):
        axes.axvspan(
            batch - 0.5,
            batch + 0.5,
            color="tab:red",
            alpha=0.15,
            linewidth=0,
            label="warm-up or compiling" if i == 0 else None,
        )
    axes.set(xlabel="training batch", ylabel="samples/s", title=title, ylim=(0, None))
    axes.margins(x=0.01)
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", fontsize=8)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    write_atomically(path, image.getvalue())

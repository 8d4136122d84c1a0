"""throughput.png and confusion.png of a run, without a background, in inks for a light and for a dark page."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from composer import Trainer
from composer.utils import dist
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from torchmetrics.utilities.plot import plot_confusion_matrix

from composer_speedups.callbacks.checkpoints import callback_of
from composer_speedups.callbacks.history import RunHistory
from composer_speedups.callbacks.losses import LossMonitor
from composer_speedups.callbacks.throughput import Batch, ThroughputMonitor, shown_rate
from composer_speedups.core.files import atomic_file
from composer_speedups.train.config.schema import Config
from composer_speedups.train.run_folder import RunFolder

INK = "#767676"
_TEXTS = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
CHART_STYLE: Any = {**dict.fromkeys(_TEXTS, INK), "savefig.transparent": True}
"""Matplotlib's settings for a chart, in force while it is drawn and saved."""

_MOST_DRAWN = 30  # classes of a picture


def write_plot(trainer: Trainer, config: Config, folder: RunFolder, evaluation: Mapping[str, Any]) -> None:
    """Write throughput.png, and confusion.png of up to 30 classes, on rank 0, unless ``plot`` is false."""
    if dist.get_global_rank() != 0 or not config.plot:
        return
    if evaluation and evaluation["confusion"] is not None and len(evaluation["classes"]) <= _MOST_DRAWN:
        title = f"{config.run_name}, after batch {evaluation['batch']}"
        plot_confusion(evaluation["confusion"], [*evaluation["classes"]], title, folder / "confusion.png")
    monitor = callback_of(trainer.state, ThroughputMonitor)
    if monitor is not None and monitor.batches:
        losses, history = callback_of(trainer.state, LossMonitor), callback_of(trainer.state, RunHistory)
        trained, evaluated = losses.losses if losses else {}, history.evaluations if history else {}
        plot_run(monitor, trained, evaluated, config.run_name, folder / "throughput.png")


@rc_context(CHART_STYLE)
def plot_confusion(matrix: Sequence[Sequence[int]], names: Sequence[str], title: str, path: Path) -> None:
    """Draw a confusion matrix, with a row for each true class, and write a PNG."""
    side = max(4.0, 0.45 * len(names) + 2)
    figure = Figure(figsize=(side + 0.6, side), dpi=120, layout="constrained")
    axes = figure.subplots()
    labels = [(_drawable(name) or f"class {i}").replace("$", r"\$")[:20] for i, name in enumerate(names)]
    plot_confusion_matrix(torch.tensor(matrix), axes, labels=labels)
    for name in axes.get_xticklabels():  # otherwise centred, and so below the next column
        name.set(ha="right", rotation_mode="anchor")
    axes.set_title(_drawable(title))
    _write(figure, path)


@rc_context(CHART_STYLE)
def plot_run(
    monitor: ThroughputMonitor,
    losses: Mapping[int, float],
    evaluations: Mapping[int, Mapping[str, float]],
    title: str,
    path: Path,
) -> None:
    """Draw samples/s per batch over all ranks, below it losses and evaluations by their batches, and write a PNG."""
    figure = Figure(figsize=(9, 6.5), dpi=120, layout="constrained")
    above, below = panels = figure.subplots(2, 1, sharex=True)
    _draw_rates(above, monitor)
    _draw_learning(below, losses, evaluations, monitor.window)
    above.set_title(_drawable(title))
    below.set_xlabel("training batch")
    for axes in panels:
        axes.margins(x=0.01)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="upper left", bbox_to_anchor=(1.09, 1.0), fontsize=8, frameon=False)  # covers no curve
    _write(figure, path)


def _drawable(text: str) -> str:
    """The text without characters that the font lacks, about which Matplotlib would warn."""
    font = get_font(findfont(FontProperties()))
    return "".join(character for character in text if font.get_char_index(ord(character))).strip()


def _write(figure: Figure, path: Path) -> None:
    with atomic_file(path) as image:
        figure.savefig(image, format="png")


def _draw_rates(axes: Axes, monitor: ThroughputMonitor) -> None:
    batches = monitor.batches
    index = [batch.index for batch in batches]
    window = min(monitor.window, max(1, len(batches) // 4))

    def rate(some: Sequence[Batch]) -> float:
        return dist.get_world_size() * sum(batch.samples for batch in some) / sum(batch.seconds for batch in some)

    means = [rate(batches[max(0, i - window + 1) : i + 1]) for i in range(len(batches))]
    axes.plot(index, [rate([b]) for b in batches], color="tab:blue", alpha=0.35, linewidth=0.8, label="each batch")
    axes.plot(index, means, color="tab:blue", linewidth=1.8, label=f"mean of {window} batches")
    if steady := monitor.summary().get("samples_per_sec"):
        axes.axhline(steady, color=INK, linewidth=0.8, linestyle=":", label=f"steady state: {shown_rate(steady)}/s")
    for i, mark in enumerate(monitor.eval_marks):
        axes.axvline(mark, color="tab:orange", label="evaluation" if i == 0 else None)
    if unsteady := [(batch.index - 0.5, 1) for batch in batches if not batch.steady]:  # start and width
        height = axes.get_xaxis_transform()  # the panel's
        color, label = "tab:red", "warm-up or compiling"
        axes.broken_barh(unsteady, (0, 1), transform=height, color=color, alpha=0.15, linewidth=0, label=label)
    axes.set(ylabel="samples/s", ylim=(0, None))


def _draw_learning(
    axes: Axes, trained: Mapping[int, float], evaluations: Mapping[int, Mapping[str, float]], window: int
) -> None:
    """Draw the training losses and their mean, and loss and accuracy of evaluations, with accuracy on its own axis."""
    batches, losses = [*trained], [*trained.values()]

    def evaluated(name: str) -> dict[int, float]:
        return {batch: values[name] for batch, values in evaluations.items() if name in values}

    means = [statistics.fmean(losses[max(0, i - window + 1) : i + 1]) for i in range(len(losses))]
    axes.plot(batches, losses, color="tab:blue", alpha=0.25, linewidth=0.8, label="training loss")
    axes.plot(batches, means, color="tab:blue", linewidth=1.8, label=f"mean of {window} batches")
    axes.set(ylabel="loss", ylim=(0, None))
    if validation := evaluated("loss"):
        axes.plot([*validation], [*validation.values()], "o", color="tab:red", label="validation loss")
    if accuracy := evaluated("accuracy"):
        right = axes.twinx()
        right.plot([*accuracy], [*accuracy.values()], "s--", color="tab:green", clip_on=False)
        right.set(ylabel="accuracy", ylim=(0, 1))
        right.spines["top"].set_visible(False)
        axes.plot([], [], "s--", color="tab:green", label="validation accuracy")  # for one legend of both axes

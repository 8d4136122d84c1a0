"""runs/<name>/throughput.png: samples/s of every batch, and below it the losses and the accuracy; and confusion.png.

Charts have no background, and inks that can be read on a light and on a dark page.
"""

from __future__ import annotations

import io
import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer import Trainer
from composer.utils import dist
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font

from composer_speedups.callbacks.history import RunHistory
from composer_speedups.callbacks.losses import LossMonitor
from composer_speedups.callbacks.throughput import Batch, ThroughputMonitor
from composer_speedups.core.files import write_atomically
from composer_speedups.train.config.schema import Config
from composer_speedups.train.report import callback_of

if TYPE_CHECKING:
    from composer_speedups.train.run_folder import RunFolder

INK = "#767676"
_TEXTS = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
CHART_STYLE: Any = {**dict.fromkeys(_TEXTS, INK), "savefig.transparent": True}
"""Matplotlib's settings for a chart, in force while it is drawn and saved."""

_MOST_DRAWN = 30  # classes of a picture
Learned = tuple[Mapping[int, float], Mapping[int, Mapping[str, float]]]


def write_plot(trainer: Trainer, config: Config, folder: RunFolder, evaluation: Mapping[str, Any]) -> None:
    """Write throughput.png and, if there is a confusion matrix of up to 30 classes, confusion.png on rank 0, unless
    ``plot`` is false or nothing was measured.

    Args:
        trainer: The Trainer after ``fit``.
        config: The run's config.
        folder: The run's folder.
        evaluation: This section of the report.
    """
    if dist.get_global_rank() != 0 or not config.plot:
        return
    if evaluation and evaluation["confusion"] is not None and len(evaluation["classes"]) <= _MOST_DRAWN:
        names, title = [*evaluation["classes"]], f"{config.run_name}, after batch {evaluation['batch']}"
        plot_confusion(evaluation["confusion"], names, title, folder / "confusion.png")
    monitor = callback_of(trainer.state, ThroughputMonitor)
    if monitor is not None and monitor.batches:
        losses, history = callback_of(trainer.state, LossMonitor), callback_of(trainer.state, RunHistory)
        learned = (losses.losses, history.evaluations) if losses and history else None
        plot_run(monitor, learned, config.run_name, folder / "throughput.png", world=dist.get_world_size())


@rc_context(CHART_STYLE)
def plot_confusion(matrix: Sequence[Sequence[int]], names: Sequence[str], title: str, path: Path) -> None:
    """Draw the confusion matrix of an evaluation, colored by the share of each true class, and write a PNG.

    Args:
        matrix: For each true class, how often each class was predicted.
        names: The classes, in the order of rows and columns. One with characters that the font lacks, such as emoji, is
            drawn without them, after its number.
        title: Title of the picture.
        path: The PNG.
    """
    size, side = len(names), max(4.0, 0.45 * len(names) + 2)
    figure = Figure(figsize=(side + 0.6, side), dpi=120, layout="constrained")
    axes = figure.subplots()
    shares = [[count / max(1, sum(row)) for count in row] for row in matrix]
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for i, j in itertools.product(range(size), repeat=2):
        color = "white" if shares[i][j] > 0.5 else "black"
        axes.text(j, i, f"{matrix[i][j]:,}", ha="center", va="center", color=color, fontsize=8)
    drawn = [_drawable(name) for name in names]
    numbered = [
        name if name == whole else f"{i} {name}" for i, (name, whole) in enumerate(zip(drawn, names, strict=True))
    ]
    shown = [name if len(name) <= 20 else f"{name[:19]}…" for name in numbered]
    axes.set_xticks(range(size), shown, rotation=45, ha="right", fontsize=8, parse_math=False)
    axes.set_yticks(range(size), shown, fontsize=8, parse_math=False)
    axes.set(xlabel="predicted class", ylabel="true class", title=_drawable(title))
    _write(figure, path)


@rc_context(CHART_STYLE)
def plot_run(monitor: ThroughputMonitor, learned: Learned | None, title: str, path: Path, *, world: int = 1) -> None:
    """Draw samples/s per batch, and below it training loss and accuracy, and write a PNG.

    Args:
        monitor: After ``fit``.
        learned: The training losses and the evaluations' metrics by their batches; None draws samples/s only.
        title: Title of the picture.
        path: The PNG.
        world: Number of ranks; each batch's rate is multiplied by it.
    """
    figure = Figure(figsize=(9, 4 if learned is None else 6.5), dpi=120, layout="constrained")
    panels = figure.subplots(1 if learned is None else 2, 1, sharex=True, squeeze=False)[:, 0]
    _draw_rates(panels[0], monitor, world)
    panels[0].set_title(_drawable(title))
    if learned is not None:
        _draw_learning(panels[1], learned, monitor.window)
    panels[-1].set_xlabel("training batch")
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
    image = io.BytesIO()
    figure.savefig(image, format="png")
    write_atomically(path, image.getvalue())


def _draw_rates(axes: Axes, monitor: ThroughputMonitor, world: int) -> None:
    """Draw each batch, the moving average, batches outside the steady state, and evaluations."""
    batches = monitor.batches
    index = [batch.index for batch in batches]
    window = min(monitor.window, max(1, len(batches) // 4))

    def rate(some: Sequence[Batch]) -> float:
        return world * sum(batch.samples for batch in some) / sum(batch.seconds for batch in some)

    means = [rate(batches[max(0, i - window + 1) : i + 1]) for i in range(len(batches))]
    axes.plot(index, [rate([b]) for b in batches], color="tab:blue", alpha=0.35, linewidth=0.8, label="each batch")
    axes.plot(index, means, color="tab:blue", linewidth=1.8, label=f"mean of {window} batches")
    if steady := monitor.summary().get("samples_per_sec"):
        axes.axhline(steady, color=INK, linewidth=0.8, linestyle=":", label=f"steady state: {steady:,.0f}/s")
    for i, mark in enumerate(monitor.eval_marks):
        axes.axvline(mark, color="tab:orange", linewidth=1.2, label="evaluation" if i == 0 else None)
    if unsteady := [(batch.index - 0.5, 1) for batch in batches if not batch.steady]:  # start and width
        height = axes.get_xaxis_transform()  # the panel's
        color, label = "tab:red", "warm-up or compiling"
        axes.broken_barh(unsteady, (0, 1), transform=height, color=color, alpha=0.15, linewidth=0, label=label)
    axes.set(ylabel="samples/s", ylim=(0, None))


def _draw_learning(axes: Axes, learned: Learned, window: int) -> None:
    """Draw each batch's training loss and its mean, and loss and accuracy of evaluations, with accuracy on its own
    axis."""
    batches, losses = list(learned[0]), list(learned[0].values())

    def evaluated(name: str) -> dict[int, float]:
        return {batch: values[name] for batch, values in learned[1].items() if name in values}

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

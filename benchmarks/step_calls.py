"""Count the Python calls of a training step in Composer's Trainer, apart from the model and the optimizer.

    python -m benchmarks.step_calls [-v]

A busy machine does not change the counts. They are of a tiny BERT on a CPU, after the first batches, without those of
torch, transformers and the modules that compute the model: dispatch, loggers, callbacks, techniques, data and time.
The table ``host`` has times.
"""

from __future__ import annotations

import contextlib
import io
import sys
import sysconfig
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from composer import Trainer
from composer.core import Callback, State
from composer.loggers import Logger
from composer.models import HuggingFaceModel
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

import composer_speedups
from composer_speedups import recommended
from composer_speedups.train import application
from composer_speedups.train.config.load import load_config
from composer_speedups.train.startup import StartupClock

_SITE = Path(sysconfig.get_path("purelib"))
_OURS = Path(composer_speedups.__file__).parent
_COMPUTE = tuple(
    str(folder)
    for folder in (
        *(_SITE / name for name in ("torch", "transformers")),
        *(_OURS / name for name in ("packing", "kernels", "families")),
        *(_OURS / "algorithms" / name for name in ("fused_layers", "unpadding")),
    )
)
_YAMLS = Path(__file__).parents[1] / "yamls"
_SHORT = "trainer.max_duration=2ep data.eval_samples=8 trainer.device=cpu export=false plot=false on_unavailable=warn"
_QUICKSTART = "baseline=null data.train_samples=800"
_FAST = "model.init=random model.size=tiny data.source=builtin data.tokenizer=wordpiece data.train_samples=1000"


class CallCounter(Callback):
    """Counts the calls of the steps from ``first`` on, each from BEFORE_DATALOADER to the next one.

    Attributes:
        calls: Function's file and name → calls; ``steps`` is the number of steps.
    """

    def __init__(self, first: int = 5) -> None:
        self.first, self.steps = first, 0
        self.calls: Counter[str] = Counter()

    def before_dataloader(self, state: State, logger: Logger) -> None:
        if state.timestamp._batch._value >= self.first:
            sys.setprofile(self._note)

    def batch_end(self, state: State, logger: Logger) -> None:
        self.steps += sys.getprofile() is not None

    def epoch_end(self, state: State, logger: Logger) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, kind: str, _: Any) -> None:
        code = frame.f_code
        if kind == "call" and not code.co_filename.startswith(_COMPUTE) and code.co_filename != __file__:
            self.calls[f"{code.co_filename}:{code.co_qualname}"] += 1

    def per_step(self) -> int:
        """Mean number of calls."""
        return round(self.calls.total() / max(self.steps, 1))


def count(algorithms: list[Any]) -> CallCounter:
    """Train 25 batches of a tiny BERT in a plain Trainer."""
    torch.manual_seed(0)
    mask, label = torch.ones(12, dtype=torch.long), torch.tensor(1)
    rows = [{"input_ids": torch.randint(5, 90, (12,)), "attention_mask": mask, "labels": label} for _ in range(100)]
    config = BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    counter = CallCounter()
    model = HuggingFaceModel(BertForSequenceClassification(config), use_logits=True)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(rows, batch_size=4),  # type: ignore[arg-type]
        optimizers=torch.optim.AdamW(model.parameters()),
        algorithms=algorithms,
        callbacks=[counter],
        max_duration="1ep",
        device="cpu",
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    return counter


def count_program(yaml: str, overrides: str) -> CallCounter:
    """Train two epochs of 25 batches with train.py, with the callbacks, loggers and progress display of a YAML, and
    count in the second, in which no length of a row is new."""
    counter = CallCounter(first=30)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        config = load_config(_YAMLS / f"{yaml}.yaml", [*overrides.split(), *_SHORT.split(), f"runs_folder={folder}"])
        application.train(config, StartupClock(), callbacks=[counter])
    return counter


def quickstart() -> CallCounter:
    """README's first command."""
    return count_program("quickstart", _QUICKSTART)


def fast_set() -> CallCounter:
    """The fast set's YAML with a tiny model and what a CPU can do of the set."""
    return count_program("bert_imdb_fast", _FAST)


def main() -> None:
    """Print the counts, and with ``-v`` the functions that are called most."""
    warnings.simplefilter("ignore")
    sets: dict[str, Callable[[], list[Any]]] = {
        "Composer": list,
        "recommended without lean_dispatch": lambda: [t for t in recommended("warn") if t.name != "lean_dispatch"],
        "recommended": lambda: recommended("warn"),
    }
    rows: dict[str, Callable[[], CallCounter]] = {
        **{label: partial(lambda algorithms: count(algorithms()), made) for label, made in sets.items()},
        "train.py, quickstart": quickstart,
        "train.py, fast set": fast_set,
    }
    for label, train in rows.items():
        counter = train()
        print(f"{label:35} {counter.per_step():>6,} calls per step")
        for name, calls in counter.calls.most_common(40 if "-v" in sys.argv else 0):
            print(f"    {calls / counter.steps:8.1f}  {name}")


if __name__ == "__main__":
    main()

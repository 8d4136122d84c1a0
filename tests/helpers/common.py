"""Tiny models, awkward batches, and a Trainer around them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from composer import Trainer
from composer.core import Algorithm, Callback, DataSpec, Event, State
from composer.devices import DeviceCPU, DeviceGPU
from composer.loggers import InMemoryLogger, Logger
from composer.models import HuggingFaceModel
from composer.optim import ConstantScheduler
from composer.utils import dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification

from composer_speedups.core.errors import Refusal
from tests.reference.loop import EPS

Batch = dict[str, Tensor]
VOCABULARY = 64
SAVING: dict[str, Any] = {"save_interval": "2ba", "save_filename": "ba{batch}.pt", "save_latest_filename": None}


def tiny_config(**settings: Any) -> BertConfig:
    """Two layers of 32; other values are BERT's defaults, unless given."""
    return BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        **{"vocab_size": VOCABULARY, **settings},
    )


def tiny_bert(*, dropout: float = 0.0, seed: int = 0) -> BertForSequenceClassification:
    """Two layers of 32, with eager attention. Weights large enough that a wrong mask shows in the logits."""
    torch.manual_seed(seed)
    config = tiny_config(initializer_range=0.2, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    return BertForSequenceClassification._from_config(config, attn_implementation="eager")


def batch(lengths: Sequence[int], width: int | None = None, *, seed: int = 0) -> Batch:
    """Random tokens with right padding; rows of length 0 have the label that the loss ignores."""
    generator = torch.Generator().manual_seed(seed)
    sizes, width = torch.tensor(lengths), width or max(lengths)
    mask = (torch.arange(width) < sizes[:, None]).long()
    ids = torch.randint(1, VOCABULARY, mask.shape, generator=generator) * mask
    labels = torch.randint(0, 2, (len(lengths),), generator=generator)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels.masked_fill(sizes == 0, -100)}


def without_labels(inputs: Batch) -> Batch:
    return {name: value for name, value in inputs.items() if name != "labels"}


def awkward_batches() -> list[Batch]:
    """Ragged; one row; length 1; 2 short of a multiple of 8, with an all-padding row; no padding at all."""
    shapes = [([9, 16, 3, 12], None), ([11], None), ([1, 1, 1], None), ([14, 0, 5], 14), ([8, 8], None)]
    return [batch(lengths, width, seed=i) for i, (lengths, width) in enumerate(shapes)]


def plain_batches(count: int = 4) -> list[Batch]:
    """Batches of one shape with some padding."""
    return [batch([12, 7, 16, 10], seed=100 + i) for i in range(count)]


def learnable_batches(count: int = 200, rows: int = 16) -> list[Batch]:
    """Batches whose label can be learned: whether the first token lies in the upper half of the vocabulary."""
    lengths = torch.randint(4, 17, (count, rows), generator=torch.Generator().manual_seed(5)).tolist()
    batches = [batch(sizes, 16, seed=1000 + i) for i, sizes in enumerate(lengths)]
    for inputs in batches:
        inputs["labels"] = (inputs["input_ids"][:, 0] >= VOCABULARY // 2).long()
    return batches


def grouped_adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    """Two groups with rates, a decay and a key of their own."""
    parameters = list(model.parameters())
    groups: list[Any] = [
        {"params": parameters[::2], "lr": 2e-3},
        {"params": parameters[1::2], "weight_decay": 0.0, "name": "my own key"},
    ]
    return torch.optim.AdamW(groups, lr=1e-3, eps=EPS, weight_decay=0.1, foreach=False)


class Batches(Dataset[Batch]):
    """A dataset whose items are batches."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Batch:
        return copy.deepcopy(self.batches[index])


def data_spec(batches: list[Batch], **settings: Any) -> DataSpec:
    """Batches that are trained whole; ``settings`` are those of their DataLoader."""
    loader: Any = DataLoader(Batches(batches), batch_size=None, **settings)
    return DataSpec(loader, split_batch=lambda b, n: [b], get_num_samples_in_batch=_rows)


class Recorder(Callback):
    """Records the losses of all batches and the gradients of the first one."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.first_gradients: dict[str, Tensor] = {}

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.AFTER_TRAIN_BATCH and not self.first_gradients:
            named = state.model.model.named_parameters()
            self.first_gradients = {n: p.grad.detach().clone() for n, p in named if p.grad is not None}
        if event == Event.BATCH_END and state.total_loss_dict:
            self.losses.append(float(state.total_loss_dict["loss/train/total"]))


def make_trainer(
    algorithms: Sequence[Algorithm] = (),
    *,
    batches: list[Batch] | None = None,
    model: Any = None,
    gpu: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    callbacks: Sequence[Callback] = (),
    cls: type[Trainer] = Trainer,
    **kwargs: Any,
) -> Trainer:
    """A quiet fp32 Trainer over the batches of one epoch, with AdamW one parameter at a time."""
    batches = plain_batches() if batches is None else batches
    hf_model = tiny_bert() if model is None else model
    composer_model = HuggingFaceModel(hf_model, use_logits=True) if not hasattr(hf_model, "loss") else hf_model
    if optimizer is None:
        optimizer = torch.optim.AdamW(
            composer_model.parameters(), lr=1e-3, eps=EPS, weight_decay=0.01, foreach=False, fused=False
        )
    settings: dict[str, Any] = {
        "max_duration": f"{len(batches)}ba",
        "schedulers": ConstantScheduler(),
        "loggers": [InMemoryLogger()],
        "progress_bar": False,
        "precision": "fp32",
        "device": DeviceGPU(allow_tf32=False) if gpu else DeviceCPU(),
        "seed": 3,
        "device_train_microbatch_size": 100,  # the loader knows none
    }
    if "train_dataloader" not in kwargs:  # several ranks need one with a distributed sampler
        settings["train_dataloader"] = data_spec(batches, sampler=in_turn(batches))
    return cls(
        model=composer_model,
        optimizers=optimizer,
        algorithms=list(algorithms),
        callbacks=list(callbacks),
        **{**settings, **kwargs},
    )


def trained(algorithms: Sequence[Algorithm] = (), **settings: Any) -> Trainer:
    """Return a Trainer of :func:`make_trainer` after training. It is closed, also if training raises."""
    return fit_and_close(make_trainer(algorithms, **settings))


def fit_and_close(trainer: Trainer) -> Trainer:
    try:
        trainer.fit()
    finally:
        trainer.close()
    return trainer


def assert_not_engaged(trainer: Trainer, message: str) -> None:
    """Check that training stops, because a technique had no effect; ``message`` is a regular expression."""
    with pytest.raises(Refusal, match=f"was applied but did not take effect: .*{message}"):
        fit_and_close(trainer)


def microbatches(batches: list[Batch], rows: int) -> dict[str, Any]:
    """Settings of :func:`make_trainer` that split every batch into micro-batches of this many rows."""

    def split(batch: Batch, _: Any) -> list[Batch]:
        pieces = {name: tensor.split(rows) for name, tensor in batch.items()}
        return [dict(zip(pieces, piece, strict=True)) for piece in zip(*pieces.values(), strict=True)]

    loader = DataLoader(Batches(batches), batch_size=None, sampler=in_turn(batches))
    data = DataSpec(loader, split_batch=split, get_num_samples_in_batch=_rows)  # type: ignore[arg-type]
    return {"train_dataloader": data, "batches": batches, "device_train_microbatch_size": rows}


def in_turn(batches: list[Batch]) -> Any:
    """On several ranks, a sampler that gives each rank its share of the batches."""
    return dist.get_sampler(Batches(batches), shuffle=False) if dist.get_world_size() > 1 else None


def _rows(batch: Batch) -> int:
    return len(batch["labels"] if "labels" in batch else batch["input_ids"])


def final_weights(trainer: Trainer) -> dict[str, Tensor]:
    return {n: p.detach().cpu().clone() for n, p in trainer.state.model.named_parameters()}

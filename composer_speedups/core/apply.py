"""Techniques in any other training loop than Composer's."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from composer_speedups.core.engaging import ask, engage, techniques_of
from composer_speedups.core.errors import Refusal
from composer_speedups.core.observer import Observer, in_other_mode
from composer_speedups.core.run import Run
from composer_speedups.core.technique import Technique
from composer_speedups.core.trainer_state import is_compiled, world_size

_MOST_BATCHES = 20  # to observe; a technique of which nothing was seen until then has no effect


class Applied:
    """Techniques that :func:`apply` applied to a model.

    Attributes:
        optimizer: The optimizer to step: the one that was passed, or the one that a technique put in its place.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._observer = run, Observer(run, hears_steps=False)
        self._waiting = dict(run.techniques)
        self._mine = {id(parameter) for parameter in run.model.parameters()}
        # torch's hook lives as long as the process, so it must not keep the model alive
        after_step = weakref.WeakMethod(self._after_step)

        def stepped(*args: Any) -> None:
            if (method := after_step()) is not None:
                method(*args)

        stepped.reads_gradients = False  # type: ignore[attr-defined]  # see distributed.composer_loop
        handle = register_optimizer_step_post_hook(stepped)
        weakref.finalize(self, handle.remove)
        self._handles = [handle]
        run.give_back(self._stop_watching)  # and the run, which the model holds, keeps this object
        self.optimizer: Optimizer | None = next(iter(run.optimizers), None)
        if is_compiled(run.model):  # a hook would become part of the compiled code
            self._observer.start()
        else:
            self._handles.append(run.model.register_forward_pre_hook(self))

    @property
    def evidence(self) -> dict[str, dict[str, Any]]:
        """Name of each technique that engaged → what it changed and, after the first step, its proof and counts."""
        return {
            name: {**t.evidence, **(t.summary(self._run) if t.engaged and name not in self._waiting else {})}
            for name, t in self._run.techniques.items()
        }

    def undo(self) -> None:
        """Give back forwards, classes, hooks and flags. Parameters, adapters, experts and the optimizer stay."""
        self._run.undo.close()

    def __call__(self, model: nn.Module, _args: Any) -> None:
        """The model's forward pre-hook, which is not copied or pickled with the model."""
        if not self._waiting:
            self._stop_watching()
        elif not self._run.observing and torch.is_grad_enabled() and not in_other_mode():
            self._observer.start()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_ignore,)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        mine = any(id(p) in self._mine for group in optimizer.param_groups for p in group["params"])
        if self._run.observing and (mine or optimizer is self.optimizer):
            self._observer.stepped(optimizer)
            self._observer.seen.ended = self._observer.batches >= _MOST_BATCHES
            if not in_other_mode() and self._observer.stop():
                ask(self._run, self._waiting, self._observer.seen)

    def _stop_watching(self) -> None:
        self._observer.stop()
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _ignore(*_: Any) -> None:
    """The hook of a copy."""


def apply(model: nn.Module, techniques: Iterable[Technique], optimizer: Optimizer | None = None) -> Applied:
    """Apply techniques to a model that any loop trains: plain PyTorch, HF Trainer, sentence-transformers and others.

    They are checked, ordered and applied as in Composer's Trainer, all or none. The first batch, from its first forward
    pass with gradients to the optimizer's step, is observed, and a technique that had no effect raises there.

    Args:
        model: A transformers model, or any module; changed in place.
        techniques: Such as ``[Unpadding(), FusedLayers()]``, in any order; or one technique.
        optimizer: The loop's optimizer, for techniques that change it or parameters; use ``optimizer`` of the result
            from then on.

    Returns:
        A handle with the evidence, and ``undo()``.

    Raises:
        Refusal: A technique cannot engage, needs Composer's loop, or needs an optimizer; two conflict; or the model has
            other techniques already.
    """
    if not isinstance(model, nn.Module):
        raise Refusal("apply", f"the model is a {type(model).__name__}, not a torch.nn.Module", "pass the model first")
    techniques = techniques_of(techniques, alone=True)
    first = next(model.parameters(), torch.zeros(()))
    autocast = first.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(first.device.type)
    half = torch.get_autocast_dtype(first.device.type) if autocast else torch.float32
    run = Run(
        device=first.device,
        precision={torch.bfloat16: "amp_bf16", torch.float16: "amp_fp16"}.get(half, "fp32"),
        model=model,
        optimizers=[] if optimizer is None else [optimizer],
        ranks=world_size(),
        sharded=any(isinstance(parameter, DTensor) for parameter in model.parameters()),
    )
    engage(run, techniques)
    return Applied(run)

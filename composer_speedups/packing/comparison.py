"""Compare the loss, outputs and gradients of a changed model with those of the untouched model, on one batch.

Both run without dropout and in float32: rounding errors are then small compared with the effect of a head that reads
padding.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from composer_speedups.packing.rows import RowLengths, token_masks

Check = Literal["auto", "always", "never"]
_INPUTS = ("attention_mask", "input_ids", "token_type_ids", "position_ids", "inputs_embeds")


class Tolerance(NamedTuple):
    """How far two computations of the same value may differ by rounding, relatively."""

    value: float  # of the loss and of the outputs
    gradient: float  # of a parameter's gradient, in norm
    floor: float  # gradients below this fraction of the largest norm are compared relative to that fraction


FLOAT32 = Tolerance(1e-4, 2e-3, 1e-3)
SIXTEEN_BITS = Tolerance(3e-2, 0.15, 3e-2)


@dataclass
class Outcome:
    """The result of one batch."""

    loss: float | None  # None if only the outputs were computed
    outputs: Tensor | None  # logits, or all tensors of the output, at real tokens and in rows with at least one
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of each trainable parameter, zeros if it has none


class Difference(NamedTuple):
    """How much two outcomes differ."""

    loss: float | None  # absolute; None without losses
    gradient: float | None  # the largest relative difference of a parameter's gradient; None without gradients
    beyond: str | None  # what exceeds the tolerance, as a sentence; None if nothing does

    def evidence(self) -> dict[str, float]:
        """The difference as written to report.json."""
        evidence = {"loss": self.loss, "largest_gradient_difference": self.gradient}
        return {name: value for name, value in evidence.items() if value is not None}


def tolerance_of(model: nn.Module) -> Tolerance:
    """The tolerance for float32, or a larger one if the model computes in lower precision regardless of autocast."""
    coarse = any(p.is_floating_point() and p.dtype != torch.float32 for p in model.parameters())
    coarse = coarse or any("float8" in type(module).__name__.lower() for module in model.modules())
    return SIXTEEN_BITS if coarse else FLOAT32


def measure(
    model: nn.Module, call: Callable[[], tuple[Any, Tensor | None]], mask_BS: Tensor | None, *, gradients: bool = True
) -> Outcome:
    """Run a model on one batch in eval mode, except for its batch norms, which in training mode read padding too.
    ``call`` returns its outputs and its loss; mode, buffers, gradients and the random state are preserved."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with _quietly(model), torch.set_grad_enabled(gradients):
        outputs, loss = call()
        by_name: dict[str, Tensor] = {}
        if gradients and trained and loss is not None and loss.requires_grad:
            computed = torch.autograd.grad(loss, list(trained.values()), materialize_grads=True)
            by_name = dict(zip(trained, computed, strict=True))
    real = _real(outputs, mask_BS)
    return Outcome(None if loss is None else float(loss.detach()), None if real is None else real.detach(), by_name)


def outcome_of(model: nn.Module, inputs: Mapping[str, Any], names: Sequence[str] = ()) -> Outcome:
    """:func:`measure` for one call of a model, of whose arguments ``names`` are passed by position.

    Gradients are computed if they are enabled and the model is not sharded: those of the loss that the model returns,
    alone or among outputs; without one, of a weighted sum of the outputs that are compared.
    """
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    mask_BS = token_masks(inputs).get("attention_mask")
    mask_BS = None if mask_BS is None or mask_BS.ndim != 2 else mask_BS

    def call() -> tuple[Any, Tensor | None]:
        rest = {name: value for name, value in inputs.items() if name not in names}
        outputs = model(*(inputs[name] for name in names), **rest)
        loss = outputs[0] if isinstance(outputs, tuple) else outputs
        if not isinstance(loss, Tensor):
            loss = loss.get("loss") if isinstance(loss, Mapping) else getattr(loss, "loss", None)
        return outputs, loss if isinstance(loss, Tensor) and loss.ndim == 0 else _weighted_sum(outputs, mask_BS)

    return measure(model, call, mask_BS, gradients=torch.is_grad_enabled() and not sharded)


def _weighted_sum(outputs: Any, mask_BS: Tensor | None) -> Tensor | None:
    """A sum of outputs with fixed, different weights, so that no gradient cancels out."""
    values = _real(outputs, mask_BS)
    if values is None:
        return None
    return (values * torch.arange(values.numel(), device=values.device).float().cos()).mean()


def with_padding(batch: Any) -> Any:
    """If a batch has no padding, mask half of its first row, because a head may read the padding of later batches; not
    if the batch has other values per token, such as token labels."""
    if not isinstance(batch, dict):
        return batch
    batch = {name: value for name, value in batch.items() if not isinstance(value, RowLengths)}  # of this mask
    tensors = {str(name): value for name, value in batch.items() if isinstance(value, Tensor)}
    masks = token_masks(tensors)
    for name, value in tensors.items():
        per_token = any(value.shape[: mask.ndim] == mask.shape for mask in masks.values())
        if per_token and not any(known in name for known in _INPUTS):
            return batch
    if any(not bool(mask.all()) for mask in masks.values()):
        return batch
    padded = {name: mask.clone() for name, mask in masks.items()}
    for mask in padded.values():
        mask[:1, ..., (mask.shape[-1] + 1) // 2 :] = 0
    return {**batch, **padded}


def compare(untouched: Outcome, changed: Outcome, tolerance: Tolerance) -> Difference:
    """Compare the changed model's outcome with the untouched model's."""
    beyond, loss, largest = [], None, None
    if untouched.loss is not None and changed.loss is not None:
        loss = abs(changed.loss - untouched.loss)
        if not loss <= tolerance.value * max(1.0, abs(untouched.loss)):  # also true for NaN
            beyond.append(f"the loss is {changed.loss:.4g} instead of {untouched.loss:.4g}")
    if untouched.outputs is not None and changed.outputs is not None:
        apart = _relative(changed.outputs, untouched.outputs)
        if not apart <= tolerance.value * 10:
            beyond.append(f"its outputs differ by {apart:.1%}")
    if untouched.gradients:
        norms = {name: float(gradient.float().norm()) for name, gradient in untouched.gradients.items()}
        floor = tolerance.floor * max(norms.values())
        largest, worst = 0.0, ""
        missing = []
        for name, expected in untouched.gradients.items():
            gradient = changed.gradients.get(name, torch.zeros_like(expected))
            apart = float((gradient.float() - expected.float()).norm()) / max(norms[name], floor, 1e-30)
            if not apart <= largest:
                largest, worst = apart, name
            if norms[name] > floor and not bool(gradient.any()):
                missing.append(name)
        if missing:
            beyond.append(f"{len(missing)} of {len(norms)} parameters get no gradient, {missing[0]} among them")
        elif not largest <= tolerance.gradient:
            beyond.append(f"the gradient of {worst} differs by {largest:.1%}")
    return Difference(loss, largest, "; ".join(beyond) or None)


def _relative(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        return float("inf")
    scale = float(other.norm()) if other.numel() else 0.0
    return float((one - other).norm()) / max(scale, 1e-6) if other.numel() else 0.0


def _real(outputs: Any, mask_BS: Tensor | None) -> Tensor | None:
    """The logits that a model returned, or all its floating-point tensors, without the values at padding positions."""
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if isinstance(logits, Tensor):
        tensors: list[Any] = [logits]
    elif isinstance(outputs, Mapping):
        tensors = list(outputs.values())
    else:
        tensors = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
    real = []
    for tensor in tensors:
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.ndim == 0:
            continue
        kept = tensor.float()
        if mask_BS is not None and kept.shape[0] == mask_BS.shape[0]:
            mask = mask_BS.bool()
            kept = kept[mask] if kept.shape[:2] == mask.shape else kept[mask.any(-1)]
        real.append(kept.flatten())
    return torch.cat(real) if real else None


@contextlib.contextmanager
def _quietly(model: nn.Module) -> Iterator[None]:
    """Eval mode, float32 without TF32, without compilation; the random state and all modes are restored afterwards."""
    modes = {module: module.training for module in model.modules()}
    norms = [
        module for module, training in modes.items() if training and isinstance(module, nn.modules.batchnorm._NormBase)
    ]
    held = [(module, dict(module._buffers)) for module in modes if module._buffers]
    values = [(buffer, buffer.clone()) for _, buffers in held for buffer in buffers.values() if buffer is not None]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    precision = torch.get_float32_matmul_precision()
    with torch.random.fork_rng(sorted(devices, key=str)), torch.compiler.set_stance("force_eager"):
        torch.manual_seed(0)
        try:
            model.eval()
            for norm in norms:
                norm.train()
            torch.set_float32_matmul_precision("highest")
            with contextlib.ExitStack() as stack:
                for kind in {"cpu", *(device.type for device in devices)}:
                    stack.enter_context(torch.autocast(kind, enabled=False))
                yield
        finally:
            torch.set_float32_matmul_precision(precision)
            for module, training in modes.items():
                module.training = training
            for module, buffers in held:
                module._buffers.update(buffers)
            with torch.no_grad():
                for buffer, before in values:
                    if not torch.equal(buffer, before):
                        buffer.copy_(before)

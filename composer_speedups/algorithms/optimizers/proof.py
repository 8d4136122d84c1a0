"""Observe an optimizer's first step, and show from it and from the state that the optimizer did what it should."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from composer_speedups.algorithms.optimizers.swap import UnfitOptimizerError, with_closure
from composer_speedups.core.operator_recorder import OperatorRecorder
from composer_speedups.core.optimizer_state import plain_tensors, state_bytes, state_tensors

if TYPE_CHECKING:
    from composer_speedups.algorithms.optimizers.kinds import Kind

__all__ = ["Observed", "embedding_weights", "prove", "state_bits"]

_SAMPLE = 64  # elements compared in each parameter
# with a smaller rate, a step may be too small to change float32 weights, for example at the start of a warm-up
_MIN_RATE = 1e-6
_FIRST_MOMENTS = ("exp_avg", "state1")  # torch's and torchao's name, and bitsandbytes' name


class Observed:
    """Observes an optimizer until a step has moved parameters.

    Args:
        optimizer: Observed by step hooks, until :meth:`close`.
        operators: Whether to count the operators of its first step.

    Attributes:
        steps: Number of observed steps. One without gradients, which is what is left of a skipped batch, is ignored.
        operators: The aten operators of the first step, without those of its closure, which runs the forward and
            backward pass in Composer.
        moved: Number of parameters that the last observed step at a learning rate of at least 1e-6 changed; None before
            such a step.
        watched: Number of parameters that had a gradient in that step.
    """

    def __init__(self, optimizer: Optimizer, operators: bool) -> None:
        self.steps = self.watched = 0
        self.operators: Counter[str] = Counter()
        self.moved: int | None = None
        self._records = operators
        self._recorder: OperatorRecorder | None = None
        self._samples: dict[Tensor, Tensor] = {}
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def close(self) -> None:
        self._stop()
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        self._stop()  # of a step that raised
        if self.moved:
            return None
        if any(float(group["lr"]) >= _MIN_RATE for group in optimizer.param_groups):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self._samples = {p: _sample(p).clone() for p in parameters}
        if not self._records or self.steps:
            return None
        changed = with_closure(args, kwargs, self._then_start)
        if changed is None:
            self._start()
        return changed

    def _then_start(self, closure: Any) -> Any:
        def closure_then_start(*args: Any, **kwargs: Any) -> Any:
            loss = closure(*args, **kwargs)
            self._start()
            return loss

        return closure_then_start

    def _start(self) -> None:
        self._recorder = OperatorRecorder()
        self._recorder.__enter__()

    def _stop(self) -> Counter[str]:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return Counter()
        recorder.__exit__(None, None, None)
        return recorder.counts

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        operators, samples = self._stop(), self._samples
        self._samples = {}
        if self.moved or all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
            return
        self.steps += 1
        self.operators += operators
        changed = [(_sample(p) != old).any() for p, old in samples.items() if p.grad is not None]
        if changed:
            self.watched, self.moved = len(changed), int(torch.stack(changed).sum())


def prove(kind: Kind, observed: Observed, optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """Evidence of a kind of optimizer after its first step.

    Raises:
        UnfitOptimizerError: The step, or the state that it left, is not what the kind says.
    """
    evidence: dict[str, Any] = {}
    if kind.flag:
        ran = {name: n for name, n in observed.operators.items() if name.startswith(f"_{kind.flag}_")}
        if not ran:
            reason = f"the first step ran no _{kind.flag}_* operator"
            raise UnfitOptimizerError(reason, "keep the optimizer's flags as they are")
        evidence["operators_in_one_step"] = ran
    if observed.moved is not None:
        if not observed.moved and kind.must_move:
            raise UnfitOptimizerError(f"a step of {kind.label} moved no parameter", "look at its gradients")
        evidence["parameters_moved"] = f"{observed.moved} of {observed.watched}"
    dtypes: dict[str, set[str]] = {}
    for key, tensor in state_tensors(optimizer):
        if tensor.numel() > 1:  # a step count is a scalar
            dtypes.setdefault(key, set()).add(str(tensor.dtype).removeprefix("torch."))
    evidence["state_dtypes"] = {key: sorted(names) for key, names in sorted(dtypes.items())}
    evidence["state_bytes"] = state_bytes(optimizer)
    return evidence | kind.check(optimizer, model)


def embedding_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weights of all ``nn.Embedding`` modules. A decoder tied to one of them shares its weight and is not counted
    again."""
    embeddings: list[Any] = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    return list(dict.fromkeys(e.weight for e in embeddings))


def state_bits(optimizer: Optimizer, model: nn.Module, bits: int, size_setting: str) -> dict[str, Any]:
    """Evidence of a quantised state, in which embeddings keep 32 bits.

    Args:
        optimizer: An optimizer that has stepped.
        model: Its model, with the embeddings.
        bits: Bits per value that some tensors must have.
        size_setting: The setting that limits the size of quantised parameters, for the message.

    Raises:
        UnfitOptimizerError: No tensor has these bits, or an embedding has others than 32.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found = {p: n for p in parameters if (n := _bits(optimizer, p)) is not None}
    tensors, values = Counter(map(str, found.values())), Counter[str]()
    for parameter, n in found.items():
        values[str(n)] += parameter.numel()
    embeddings = sorted({found[weight] for weight in embedding_weights(model) if weight in found})
    reason = None if str(bits) in tensors else f"no parameter has {bits}-bit state"
    if set(embeddings) - {32}:
        reason = f"embeddings have {embeddings[0]}-bit state"
    if reason is not None:
        raise UnfitOptimizerError(reason, f"lower {size_setting}, or remove it: the model is too small for it")
    return {
        "tensors_by_state_bits": dict(tensors),
        "values_by_state_bits": dict(values),
        "embedding_state_bits": embeddings,
    }


def _bits(optimizer: Optimizer, parameter: Tensor) -> int | None:
    """Bits per value of the first moment, without scales; None before the parameter's first step."""
    state = optimizer.state.get(parameter, {})
    moment = next((state[name] for name in _FIRST_MOMENTS if name in state), None)
    if moment is None:
        return None
    codes = max(plain_tensors(moment), key=lambda t: t.nbytes)
    return round(8 * codes.nbytes / parameter.numel())


def _sample(parameter: Tensor) -> Tensor:
    flat = parameter.detach().reshape(-1)
    return flat[:: max(1, len(flat) // _SAMPLE)][:_SAMPLE]

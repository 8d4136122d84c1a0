"""Show from an optimizer's first step, and from the state that it left, that the optimizer did what it should."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from composer_speedups.algorithms.optimizers.swap import UnfitOptimizerError
from composer_speedups.core.optimizer_state import plain_tensors, state_bytes, state_tensors

if TYPE_CHECKING:
    from composer_speedups.algorithms.optimizers.kinds import Kind
    from composer_speedups.core.run import FirstBatch

_FIRST_MOMENTS = ("exp_avg", "state1")  # torch's and torchao's name, and bitsandbytes' name


def prove(kind: Kind, seen: FirstBatch, optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """Evidence of a kind of optimizer after its first step.

    Raises:
        UnfitOptimizerError: The step, or the state that it left, is not what the kind says.
    """
    evidence: dict[str, Any] = {}
    if kind.flag:
        operators = {"fused": "_fused_", "foreach": "_foreach_add"}[kind.flag]  # clipping runs others of foreach
        ran = {name: n for name, n in seen.operators.items() if name.startswith(operators)}
        if not ran:
            reason = f"the first step ran no {operators}* operator"
            raise UnfitOptimizerError(reason, "keep the optimizer's flags as they are")
        evidence["operators_in_one_step"] = ran
    if seen.moved is not None:
        if not seen.moved and kind.must_move:
            raise UnfitOptimizerError(f"a step of {kind.label} moved no parameter", "look at its gradients")
        evidence["parameters_moved"] = f"{seen.moved} of {seen.trained}"
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

"""The tensors of an optimizer's state, and new parameters in its groups."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from composer_speedups.core.trainer_state import local_shard


def state_tensors(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the state with its key; quantised tensors as the plain tensors that they consist of."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor):
                yield from ((str(key), part) for part in plain_tensors(value))


def plain_tensors(tensor: Any) -> Iterator[Tensor]:
    """The plain tensors that a quantised or sharded tensor consists of, or a plain tensor itself."""
    tensor = local_shard(tensor)
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(tensor, name))
    else:
        yield tensor


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of the state on all devices. Tensors that several parameters share, such as look-up tables, count once."""
    return sum({(t.device, t.data_ptr()): t.nbytes for _, t in state_tensors(optimizer)}.values())


def replace_parameters(
    optimizers: Iterable[Optimizer],
    replacements: Mapping[nn.Parameter, Sequence[nn.Parameter]],
    names: Mapping[nn.Parameter, str],
    *,
    for_untrained: Literal["no group", "first group"] = "no group",
) -> None:
    """Replace old parameters by new ones in the same groups; a second call changes nothing.

    Groups stay, even empty ones, because schedulers count them. An old parameter's state is passed on if exactly one
    new parameter replaces it. ``for_untrained`` is the group for new parameters whose old one is in none.
    """
    groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    held = {p for _, group in groups for p in group["params"]}
    successors = {old: [new for new in news if new not in held] for old, news in replacements.items()}
    untrained = [new for old, news in successors.items() if old not in held for new in news]
    for index, (optimizer, group) in enumerate(groups):
        old_parameters = list(group["params"])
        group["params"][:] = [new for old in old_parameters for new in successors.get(old, [old])]
        if index == 0 and for_untrained == "first group":
            group["params"] += untrained
        if "param_names" in group:  # torch records names if the optimizer was built from named parameters
            known = {**names, **dict(zip(old_parameters, group["param_names"], strict=True))}
            group["param_names"] = [known[p] for p in group["params"]]
        for old in old_parameters:
            if old in successors and (state := optimizer.state.pop(old, None)) and len(successors[old]) == 1:
                optimizer.state[successors[old][0]] = state

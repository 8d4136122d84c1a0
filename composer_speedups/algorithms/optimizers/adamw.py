"""AdamW in the forms that no library has: on the host, split over ranks, and quantised except for embeddings."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import AdamW, Optimizer
from torch.optim.adamw import adamw

from composer_speedups.core.compile_counts import counted_apart
from composer_speedups.core.optimizer_state import plain_tensors

_BUCKET_BYTES = 2**26  # tensors up to this size are broadcast as one, through a copy, as DDP does with buffers


class HostAdamW(Optimizer):
    """AdamW that copies gradients and weights to the CPU in each step, updates them there, and copies weights back.

    torchao's CPUOffloadOptimizer copies gradients to the CPU during the backward pass, hence before they are clipped,
    unscaled or averaged over ranks, and has neither ``state`` nor hooks, so Composer cannot save it.

    Source: ZeRO-Offload (arXiv 2101.06840).
    """

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__(groups, defaults)
        self.register_load_state_dict_post_hook(_to_host)  # torch moves a loaded state to its parameters' device

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()  # with gradients enabled, by a hook
        for group in self.param_groups:
            stepped = [p for p in group["params"] if p.grad is not None]
            weights, gradients = [_host(p) for p in stepped], [_host(p.grad) for p in stepped]
            for device in {p.device for p in stepped if p.is_cuda}:
                torch.cuda.synchronize(device)  # the copies to the host do not wait
            states = [self.state[p] for p in stepped]
            for weight, state in zip(weights, states, strict=True):
                if not state:
                    moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
                    state.update(step=torch.zeros((), dtype=torch.float32), **moments)
            adamw(
                weights,
                gradients,
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                amsgrad=False,
                maximize=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
            )
            for parameter, weight in zip(stepped, weights, strict=True):
                parameter.copy_(weight, non_blocking=True)
        return loss


def _host(tensor: Tensor) -> Tensor:
    """A copy in pinned host memory, which is complete once the device is synchronized."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor, non_blocking=True)


def _to_host(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state.update({key: value.cpu() for key, value in state.items() if isinstance(value, Tensor)})


class ShardedAdamW(ZeroRedundancyOptimizer):
    """AdamW, torch's fused one on a GPU, with each parameter's state on one rank, and the state dict of a plain AdamW.

    What is replaced in torch's class: it sends each parameter separately; it turns the state that it consolidates into
    tensors byte by byte, which takes minutes for BERT-base; its ``load_state_dict`` does not accept the parameter names
    that Composer's checkpoints have; and its ``state`` is empty, so that torch's distributed state dicts, which
    Composer uses, would take an additional step before each checkpoint.
    """

    __qualname__ = "AdamW"  # Composer's checkpoints name an optimizer's state after its class

    # Attributes of torch's class that its type stub omits
    _default_device: torch.device
    _index_to_param: list[Tensor]
    _param_to_rank: dict[Tensor, int]

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        on_gpu = all(p.is_cuda for group in groups for p in group["params"])
        super().__init__(groups, AdamW, **defaults, fused=on_gpu or None)

    def _sync_params(self) -> None:
        """Send every rank's updated parameters to the others, at the end of a step."""
        for parameter in self._index_to_param:
            if parameter.grad is not None:
                self.state[parameter] = self.optim.state.get(parameter, {})
        for rank, groups in enumerate(self._partition_parameters()):  # type: ignore[attr-defined]
            weights = [p.detach() for group in groups for p in group["params"] if p.requires_grad]
            if weights:
                self._broadcast(weights, rank)

    def _broadcast(self, tensors: list[Tensor], rank: int) -> None:
        distributed._broadcast_coalesced(self.process_group, tensors, _BUCKET_BYTES, rank)

    def state_dict(self) -> dict[str, Any]:
        """The state dict of a plain AdamW, in rank 0's host memory, and of meta tensors on other ranks. Collective."""
        parameters = self._index_to_param
        stepped = torch.tensor([p in self.optim.state for p in parameters], device=self._default_device).byte()
        distributed.all_reduce(stepped, distributed.ReduceOp.MAX, self.process_group)
        whole = Optimizer.state_dict(self)
        whole["state"] = {}
        for index in stepped.nonzero().flatten().tolist():
            parameter = parameters[index]
            owner = self._param_to_rank[parameter]
            held = self.optim.state[parameter] if owner == self.rank else {}
            like = torch.empty_like(parameter, requires_grad=False)
            count = torch.empty((), dtype=torch.float32)
            entry = {
                name: held.get(name, other).to(parameter.device, copy=True)
                for name, other in (("step", count), ("exp_avg", like), ("exp_avg_sq", like))
            }
            self._broadcast([*entry.values()], owner)
            kept_on = "meta" if self.rank else "cpu"
            whole["state"][index] = {name: value.to(kept_on) for name, value in entry.items()}
        return whole

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of a plain AdamW, the same on every rank, with any names of the parameters."""
        # torch takes the implementation from the state dict, which may have been written on another device.
        implementation = {name: self.param_groups[0][name] for name in ("fused", "foreach")}
        groups = [group | implementation for group in state_dict["param_groups"]]
        keys = chain.from_iterable(group["params"] for group in groups)
        mine = {key for key, p in zip(keys, self._index_to_param, strict=False) if self._param_to_rank[p] == self.rank}
        state = {key: entry if key in mine else {} for key, entry in state_dict["state"].items()}
        Optimizer.load_state_dict(self, {"state": state, "param_groups": groups})
        self.optim.state = defaultdict(dict, {parameter: entry for parameter, entry in self.state.items() if entry})


def embedding_weights(model: nn.Module) -> set[Tensor]:
    """The weights of all ``nn.Embedding`` modules, which need full-precision state: with 8-bit and fp8 state, rows
    without a gradient in a batch make large jumps."""
    return {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}


def bnb_adamw(groups: list[dict[str, Any]], embeddings: set[Tensor], **settings: Any) -> Optimizer:
    """bitsandbytes' AdamW, in which embeddings have 32-bit state.

    bitsandbytes' own way, a process-wide manager of exceptions by ``id()``, would apply them to later parameters, too.
    """
    from bitsandbytes import optim

    class BnbAdamW(optim.AdamW):  # type: ignore[misc, name-defined]
        __qualname__ = "BnbAdamW"  # the name of its state in Composer's checkpoints

        def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
            config: dict[str, Any] = super().get_config(gindex, pindex, group)
            return config | ({"optim_bits": 32} if group["params"][pindex] in embeddings else {})

    return BnbAdamW(groups, **settings)  # type: ignore[no-any-return]


@cache
def _torchao_class(bits: Any) -> Any:
    from torchao import optim
    from torchao.optim.adam import _AdamBase  # has no step hooks of torch, which run around the step below

    base: Any = {8: optim.AdamW8bit, 4: optim.AdamW4bit, "fp8": optim.AdamWFp8}[bits]

    def _new_buffer(self: Any, p: Tensor, signed: bool) -> Tensor:
        """Create a state tensor; torchao's method has a fixed minimum size of 4096 values."""
        if p in self.embeddings or p.numel() < self.min_size or p.numel() % self.block_size:
            return torch.zeros_like(p)
        return self._subclass_zeros(p, signed, self.block_size)  # type: ignore[no-any-return]

    def step(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        """Run the closure outside of the step's compilation settings, which must not affect the model, then step.
        The step is compiled on a GPU only."""
        loss = None if closure is None else closure()
        compiled = any(p.is_cuda for group in self.param_groups for p in group["params"])
        with counted_apart(), torch.compiler.set_stance("default" if compiled else "force_eager"):
            _AdamBase.step(self)
        return loss

    name = f"Torchao{base.__name__}"
    members = {"__module__": __name__, "__qualname__": name, "_new_buffer": _new_buffer, "step": step}
    return type(name, (base,), members)


def torchao_adamw(
    groups: list[dict[str, Any]], embeddings: set[Tensor], bits: Any, min_size: int, **settings: Any
) -> Optimizer:
    """torchao's AdamW8bit, AdamW4bit or AdamWFp8, with state of the parameter's dtype for embeddings, parameters with
    fewer than ``min_size`` values, and those whose number of values is not a multiple of the block size."""
    optimizer = _torchao_class(bits)(groups, **settings)
    optimizer.embeddings, optimizer.min_size = embeddings, min_size
    return optimizer  # type: ignore[no-any-return]


def tensors_by_state_bits(optimizer: Optimizer) -> dict[str, int]:
    """The number of parameters by the bits per value of their first moment, without scales."""
    counts: Counter[str] = Counter()
    for parameter, state in optimizer.state.items():
        moment = state.get("state1", state.get("exp_avg"))  # bitsandbytes' name, and torchao's
        if moment is not None:
            codes = max(plain_tensors(moment), key=lambda t: t.nbytes)
            counts[str(round(8 * codes.nbytes / parameter.numel()))] += 1
    return dict(counts)

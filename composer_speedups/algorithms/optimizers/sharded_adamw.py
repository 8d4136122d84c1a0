"""AdamW whose state is split over the ranks, with the state dict of a plain AdamW.

torch's ZeroRedundancyOptimizer assigns each parameter to one rank, which holds its state, updates it, and sends it to
the others. What is replaced here: torch sends each parameter separately; it turns the state that it consolidates into
tensors byte by byte, which takes minutes for BERT-base; its ``load_state_dict`` changes the dict it is given and does
not accept the parameter names that Composer's checkpoints have; and its ``state`` is empty, so that torch's distributed
state dicts, which Composer uses, would take an additional step before each checkpoint.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import chain
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import AdamW, Optimizer

_BUCKET_BYTES = 2**26  # tensors up to this size are broadcast as one, through a copy, as DDP does with buffers


class ShardedAdamW(ZeroRedundancyOptimizer):
    """AdamW, torch's fused one on a GPU, with each parameter's state on one rank of the default process group.

    Every rank has to call :meth:`step`, :meth:`state_dict` and :meth:`load_state_dict`. ``state`` has an entry for each
    parameter that has stepped; those of other ranks' parameters are empty.

    Args:
        groups: Parameter groups, the same on each rank, with parameters of one dtype.
        defaults: ``lr``, ``betas``, ``eps`` and ``weight_decay`` of groups that lack them.
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
        """Send every rank's updated parameters to the others. Called at the end of a step."""
        for parameter in self._index_to_param:
            if parameter.grad is not None:
                self.state[parameter] = self.optim.state.get(parameter, {})
        self._forget_removed()
        for rank, groups in enumerate(self._partition_parameters()):  # type: ignore[attr-defined]
            weights = [p.detach() for group in groups for p in group["params"] if p.requires_grad]
            if weights:
                self._broadcast(weights, rank)

    def _forget_removed(self) -> None:
        """Free the state of parameters that were removed from ``state``, such as those of layers that were frozen."""
        for parameter in self.optim.state.keys() - self.state.keys():
            del self.optim.state[parameter]

    def _broadcast(self, tensors: list[Tensor], rank: int) -> None:
        distributed._broadcast_coalesced(self.process_group, tensors, _BUCKET_BYTES, rank)

    def state_dict(self) -> dict[str, Any]:
        """The state dict of a plain AdamW over all parameters, collected one parameter at a time.

        Every rank has to call it. Rank 0 receives the state in host memory, the others tensors on the meta device.
        """
        self._forget_removed()
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
        """Load a state dict of this class or of a plain AdamW, written by any number of ranks.

        Args:
            state_dict: The same on every rank; it is not changed. Parameters are named by any keys.
        """
        # torch takes the implementation from the state dict, which may have been written on another device.
        implementation = {name: self.param_groups[0][name] for name in ("fused", "foreach")}
        groups = [group | implementation for group in state_dict["param_groups"]]
        keys = chain.from_iterable(group["params"] for group in groups)
        mine = {key for key, p in zip(keys, self._index_to_param, strict=False) if self._param_to_rank[p] == self.rank}
        state = {key: entry if key in mine else {} for key, entry in state_dict["state"].items()}
        Optimizer.load_state_dict(self, {"state": state, "param_groups": groups})
        self.optim.state = defaultdict(dict, {parameter: entry for parameter, entry in self.state.items() if entry})

"""Let a DistributedDataParallel follow parameters that were frozen after it was created."""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel


def rebuild_reducer(model: DistributedDataParallel) -> None:
    """Build a DDP's reducer again, for the parameters that require gradients now.

    Otherwise, DDP would wait for the gradients of parameters that were frozen after it was created. Call it on every
    rank, between a backward pass and the next forward pass. Communication hooks stay registered. torch rebuilds the
    buckets in the second backward pass, as those of a new DDP.

    Source: ``DistributedDataParallel.__setstate__``, which builds the reducer of a DDP that was unpickled.
    """
    if (sums := vars(model).get("gradient_sums")) is not None:  # distributed.ddp's buckets that are still in flight
        sums.settle()
    group, state, hooks = model.process_group, model.__getstate__(), list(model._comm_hooks)
    # the old reducer's hooks on the parameters are removed when nothing refers to it any more
    del model.reducer, model.logger
    state["_comm_hooks"] = []
    model.__setstate__(state)
    assert model.process_group is group
    for hook, hook_state in hooks:
        model.register_comm_hook(hook_state, hook)

"""DDP that moves no bytes in vain, and an optimizer that steps while the last gradients are on their way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from types import MethodType
from typing import Any

import torch
from composer import algorithms
from composer.core import Algorithm, Callback, Precision, State
from composer.distributed import dist_strategy
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from composer_speedups.core.replaced import replaced

__all__ = ["BUCKETS_SETTLED", "GradientSums", "ddp_of", "lean_ddp", "overlap_steps", "sums_of"]

_BUCKET = 64  # MiB at least
BUCKETS_SETTLED = 2
"""Batches: DDP orders its buckets anew at the second one's forward pass. Techniques look at the step of the first."""


def lean_ddp() -> AbstractContextManager[None]:
    """Around the making of a Trainer: its DDP is :func:`ddp_of`'s. Composer passes no such options on."""
    return replaced(dist_strategy, "DistributedDataParallel", ddp_of)


def ddp_of(module: nn.Module, **settings: Any) -> DistributedDataParallel:
    """The module under a DDP that moves no bytes in vain, with further ``settings`` of DDP's.

    - ``gradient_as_bucket_view``: gradients stay in the buckets that ranks add up, where DDP would copy each out again
      when all is computed and nothing else is left to do; the memory is less by the gradients'.
    - A hook, :class:`GradientSums`: a bucket is divided by the number of ranks as a whole, by NCCL itself where that
      sends it, and not each gradient by itself before it is sent.
    - Buckets of 64 MiB instead of 25: matrix products lose as much time as NCCL takes beside them, which is less a byte
      the larger a bucket is.
    - ``broadcast_buffers`` only where a buffer is state: rank 0 sends them at each forward pass, and the others wait.
      BERT's are numbers of positions, which no checkpoint has.
    """
    has_state = not module.state_dict().keys().isdisjoint(name for name, _ in module.named_buffers())
    settings = {"gradient_as_bucket_view": True, "broadcast_buffers": has_state, "bucket_cap_mb": _BUCKET} | settings
    model = DistributedDataParallel(module, **settings)
    sums = GradientSums(model.process_group)
    model.register_comm_hook(None, sums.send)
    vars(model)["gradient_sums"] = sums
    return model


def sums_of(model: Any) -> GradientSums | None:
    """Those of a model that :func:`ddp_of` made; None for another."""
    return vars(model).get("gradient_sums")


class GradientSums:
    """DDP's buckets on their way between ranks, each waited for by itself.

    DDP waits for all of them before a backward pass returns. The last ones, which hold the gradients of the embeddings,
    are begun when nothing is left to compute. Unless :attr:`waits` they are left under way, and whoever reads the
    gradients has to :meth:`settle` first.

    Args:
        group: The ranks.

    Attributes:
        waits: Whether a backward pass ends with the gradients there; True at first.
        overlapped_steps: Steps of an optimizer that began before the last gradients were there.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self._under_way: list[tuple[list[Tensor], Any]] = []  # parameters of a bucket, and what to wait for
        self._sent: dict[int, int] = {}  # bytes of each bucket
        self.waits = True
        self.overlapped_steps = 0

    def send(self, state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are text
        """The hook: begin to average a bucket over the ranks. For DDP it is done then."""
        gradients = bucket.buffer()
        mean = distributed.ReduceOp.AVG  # NCCL multiplies as it reads
        if not gradients.is_cuda:
            mean = distributed.ReduceOp.SUM
            gradients.div_(distributed.get_world_size(self._group))
        work = distributed.all_reduce(gradients, mean, self._group, async_op=True)
        self._under_way.append((bucket.parameters(), work))
        if bucket.index() == 0:
            self._sent.clear()
        self._sent[bucket.index()] = gradients.nbytes
        if self.waits and bucket.is_last():
            self.settle()
        done: Any = torch.futures.Future(devices=[gradients.device] if gradients.is_cuda else None)
        done.set_result(gradients)
        return done

    @property
    def under_way(self) -> list[Tensor]:
        """The parameters whose gradients are."""
        return [parameter for parameters, _ in self._under_way for parameter in parameters]

    def settle(self) -> None:
        """Have what is computed from here on wait for all buckets; the host waits itself only where it computes."""
        for _ in self.arriving():
            pass

    def arriving(self) -> Iterator[list[Tensor]]:
        """The parameters of each bucket under way, in the order in which they were sent, once it is there."""
        under_way, self._under_way = self._under_way, []
        for parameters, work in under_way:
            work.wait()
            yield parameters

    def summary(self) -> dict[str, Any]:
        """For report.json: what goes between ranks at a step, and how many steps did not wait for all of it."""
        return {
            "buckets": len(self._sent),
            "mib_a_step": sum(self._sent.values()) / 2**20,
            "overlapped_steps": self.overlapped_steps,
        }


def overlap_steps(state: State) -> bool:
    """Have the optimizer update each bucket's parameters when their gradients are there, from the third batch on.

    AdamW computes each weight by itself, so that the values stay as they are. It is done where nothing reads gradients
    between the backward pass and the step, as clipping does, fp16's scaler, or a callback that we do not know.

    Returns:
        Whether it is.
    """
    sums = sums_of(state.model)
    if (
        sums is None
        or [type(optimizer) for optimizer in state.optimizers] != [torch.optim.AdamW]
        or state.precision == Precision.AMP_FP16
        or any(map(_may_read_gradients, [*state.algorithms, *state.callbacks]))
    ):
        return False
    optimizer = state.optimizers[0]
    # A bound method, which torch's schedulers wrap in turn.
    optimizer.step = MethodType(_by_buckets(sums, optimizer.step), optimizer)  # type: ignore[method-assign]
    return True


def _may_read_gradients(observer: Algorithm | Callback) -> bool:
    """Whether it is told of anything between the backward pass and the step, unless we know that it does not mind."""
    if isinstance(observer, algorithms.GradientClipping):
        return True
    if type(observer).__module__.startswith("composer_speedups."):
        return False
    told = ("run_event", "after_backward", "after_train_batch")
    return isinstance(observer, Algorithm) or any(
        getattr(type(observer), name) is not getattr(Callback, name) for name in told
    )


def _by_buckets(sums: GradientSums, step: Callable[[], Any]) -> Callable[..., Any]:
    whole_steps = 0

    def step_by_buckets(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        nonlocal whole_steps
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if sums.under_way:
            with _parts(optimizer, sums) as parts:
                for _ in parts:
                    step()
            sums.overlapped_steps += 1
        else:
            step()
            whole_steps += 1
            sums.waits = whole_steps < BUCKETS_SETTLED
        return loss

    return step_by_buckets


@contextmanager
def _parts(optimizer: Optimizer, sums: GradientSums) -> Iterator[Iterator[None]]:
    """At each turn the optimizer has the parameters of another bucket, and their gradients are there."""
    groups = optimizer.param_groups
    wholes = [group["params"] for group in groups]
    group_of = {id(p): group for group, whole in zip(groups, wholes, strict=True) for p in whole}

    def turns() -> Iterator[None]:
        sent = {id(p) for p in sums.under_way}
        rest = [p for whole in wholes for p in whole if id(p) not in sent]
        for parameters in chain([rest] if rest else [], sums.arriving()):
            for group in groups:
                group["params"] = []
            for parameter in parameters:
                if id(parameter) in group_of:
                    group_of[id(parameter)]["params"].append(parameter)
            yield

    try:
        yield turns()
    finally:
        sums.settle()
        for group, whole in zip(groups, wholes, strict=True):
            group["params"] = whole

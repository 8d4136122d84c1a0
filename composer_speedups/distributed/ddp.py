"""DDP that copies no gradients, and an optimizer that steps while the last gradients are on their way."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from types import MethodType
from typing import Any

import torch
from composer.core import Callback, Precision, State
from composer.distributed import dist_strategy
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from composer_speedups.distributed.gradient_readers import reader_of_gradients

__all__ = ["BUCKETS_SETTLED", "GradientSums", "OverlappedDDP", "ddp_of", "sums_of"]

log = logging.getLogger(__name__)

BUCKETS_SETTLED = 2
"""Batches: DDP orders its buckets anew at the second one's forward pass. Techniques look at the step of the first."""


class OverlappedDDP(Callback):
    """The DDP of :func:`ddp_of` in any Composer Trainer, and an optimizer that updates each bucket's parameters as soon
    as their gradients have arrived, while the last ones are still being reduced.

    ``Trainer(callbacks=[OverlappedDDP()], …)``; one process, and FSDP, stay as they are. The weights are those of
    Composer's own DDP: AdamW computes each one by itself. Steps overlap from the third batch on, with one
    ``torch.optim.AdamW`` in fp32 or bf16, where nothing reads gradients between the backward pass and the step:
    gradient clipping does, fp16's scaler, and what :func:`.reader_of_gradients` finds. Then steps are whole, the log
    says so, and :attr:`GradientSums.reader` names what it is.

    Args:
        bucket_mib: Size of DDP's buckets. Default 64.

    Source: ``torch.nn.parallel.DistributedDataParallel`` and its communication hooks.
    """

    def __init__(self, bucket_mib: float = 64) -> None:
        if bucket_mib <= 0:
            raise ValueError(f"bucket_mib must be above 0, not {bucket_mib}")
        self.bucket_mib = bucket_mib
        self._composers: Any = None
        self._stepping: Optimizer | None = None
        self._step_before: Any = None

    def after_load(self, state: State, logger: Logger) -> None:
        if dist.get_world_size() > 1 and not state.fsdp_enabled:  # the Trainer wraps the model next, with no options
            self._composers = dist_strategy.DistributedDataParallel
            dist_strategy.DistributedDataParallel = self._wrap  # type: ignore[misc, assignment]

    def _give_back(self) -> None:
        if dist_strategy.DistributedDataParallel == self._wrap:
            dist_strategy.DistributedDataParallel = self._composers  # type: ignore[misc]

    def _wrap(self, module: nn.Module, **settings: Any) -> DistributedDataParallel:
        self._give_back()
        return ddp_of(module, bucket_cap_mb=self.bucket_mib, **settings)

    def fit_start(self, state: State, logger: Logger) -> None:
        self._give_back()  # a model without trained parameters is not wrapped
        sums = sums_of(state.model)
        if sums is None or self._stepping is not None:
            return
        sums.reader = _whole_steps_for(state)
        if sums.reader is None:
            self._stepping = state.optimizers[0]
            self._step_before = vars(self._stepping).get("step")  # a scheduler's wrapper
            # A bound method, which torch's schedulers wrap in turn.
            step = _by_buckets(sums, self._stepping.step, lambda closure: reader_of_gradients(state, closure))
            self._stepping.step = MethodType(step, self._stepping)  # type: ignore[method-assign]

    def before_forward(self, state: State, logger: Logger) -> None:
        if (sums := sums_of(state.model)) is not None:
            sums.settle()  # before a pass adds to what another has left in the buckets

    def fit_end(self, state: State, logger: Logger) -> None:
        self._step_as_before(state)

    def close(self, state: State, logger: Logger) -> None:
        self._give_back()
        self._step_as_before(state)  # also after a run that raised

    def _step_as_before(self, state: State) -> None:
        """What comes after ``fit`` may read gradients where it likes."""
        if self._stepping is None:
            return
        if (sums := sums_of(state.model)) is not None:
            sums.waits = True
            sums.settle()
        if self._step_before is None:
            del self._stepping.step  # type: ignore[method-assign]
        else:
            self._stepping.step = self._step_before  # type: ignore[method-assign]
        self._stepping = self._step_before = None


def ddp_of(module: nn.Module, **settings: Any) -> DistributedDataParallel:
    """The module under a DDP that sends and copies less than torch's defaults do.

    - ``gradient_as_bucket_view``: gradients stay in the buckets that ranks reduce, where DDP would copy each out again
      when all is computed and nothing else is left to do; the memory is less by the gradients'.
    - A hook, :class:`GradientSums`: a bucket is divided by the number of ranks as a whole, by NCCL itself where that
      sends it, and not each gradient by itself before it is sent.
    - Buckets of 64 MiB instead of 25: matrix products lose as much time as NCCL takes beside them, which is less per
      byte the larger a bucket is.
    - ``broadcast_buffers`` only where a buffer is state: rank 0 sends them at each forward pass, and the others wait.
      BERT's are numbers of positions, which no checkpoint has.

    Args:
        module: On the device of this rank; the default process group is that of its ranks.
        **settings: ``DistributedDataParallel``'s, over those above.

    Returns:
        Its gradients are there when a backward pass returns, as with any DDP, until :attr:`GradientSums.waits` of
        :func:`sums_of` is set to False.
    """
    has_state = not module.state_dict().keys().isdisjoint(name for name, _ in module.named_buffers())
    settings = {"gradient_as_bucket_view": True, "broadcast_buffers": has_state, "bucket_cap_mb": 64} | settings
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
        reader: What may read gradients between the backward pass and the step, so that steps are whole; None without.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self._under_way: list[tuple[list[Tensor], Any]] = []  # parameters of a bucket, and what to wait for
        self._sent: dict[int, int] = {}  # bytes of each bucket
        self.waits = True
        self.overlapped_steps = 0
        self.reader: str | None = None

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
            "gradients_read_by": self.reader,
        }


def _whole_steps_for(state: State) -> str | None:
    """What is known before the first batch to need all gradients at once."""
    if state.precision == Precision.AMP_FP16:
        return "fp16's gradient scaler"
    kinds = [type(optimizer) for optimizer in state.optimizers]
    return None if kinds == [torch.optim.AdamW] else f"{', '.join(kind.__name__ for kind in kinds)}, which is no AdamW"


def _by_buckets(
    sums: GradientSums, step: Callable[[], Any], reader: Callable[[Any], str | None] = lambda closure: None
) -> Callable[..., Any]:
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
            return loss
        step()
        whole_steps += 1
        if whole_steps == BUCKETS_SETTLED:  # all that watches the first batches alone has gone
            sums.reader = reader(closure)
            sums.waits = sums.reader is not None
            if sums.reader:
                log.warning("DDP: the optimizer's steps wait for all gradients, which %s may read", sums.reader)
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

"""DDP without gradient copies, and optimizer steps that start while the last gradients are being reduced."""

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

from composer_speedups.distributed.composer_loop import reader_of_gradients

log = logging.getLogger(__name__)

# Batches without overlap: techniques are observed in the first one, and DDP rebuilds its buckets in the second.
BUCKETS_SETTLED = 2


class OverlappedDDP(Callback):
    """Uses the DDP of :func:`ddp_of` in any Composer Trainer, with an optimizer that updates each bucket's parameters
    as soon as their gradients have been reduced, while the last ones are still in flight.

    ``Trainer(callbacks=[OverlappedDDP()], …)``. It does not affect single processes and FSDP. The resulting weights
    equal those of Composer's DDP, because AdamW updates each weight independently. Steps overlap from the third batch
    on, with one ``torch.optim.AdamW`` in fp32 or bf16, and only if nothing reads gradients between the backward pass
    and the step. Gradient clipping reads them, as do fp16's scaler and anything that :func:`.reader_of_gradients`
    finds. In that case the optimizer steps once with all gradients, a log line says so, and :attr:`GradientSums.reader`
    names the reader.

    Args:
        bucket_mib: Size of DDP's buckets in MiB. Default 64.

    Source: ``torch.nn.parallel.DistributedDataParallel`` and its communication hooks.
    """

    def __init__(self, bucket_mib: float = 64) -> None:
        self.bucket_mib = bucket_mib
        self._composer_ddp: Any = None
        self._stepping: Optimizer | None = None
        self._step_before: Any = None

    def after_load(self, state: State, logger: Logger) -> None:
        # the Trainer wraps the model next, and has no option for it
        if dist.get_world_size() > 1 and not state.fsdp_enabled:
            self._composer_ddp = dist_strategy.DistributedDataParallel
            dist_strategy.DistributedDataParallel = self._wrap  # type: ignore[misc, assignment]

    def _give_back(self) -> None:
        if dist_strategy.DistributedDataParallel == self._wrap:
            dist_strategy.DistributedDataParallel = self._composer_ddp  # type: ignore[misc]

    def _wrap(self, module: nn.Module, **settings: Any) -> DistributedDataParallel:
        self._give_back()
        return ddp_of(module, bucket_cap_mb=self.bucket_mib, **settings)

    def fit_start(self, state: State, logger: Logger) -> None:
        self._give_back()  # models without trainable parameters are not wrapped
        sums = sums_of(state.model)
        if sums is None or self._stepping is not None:
            return
        sums.reader = _whole_steps_for(state)
        if sums.reader is None:
            self._stepping = state.optimizers[0]
            self._step_before = vars(self._stepping).get("step")  # the wrapper of a torch scheduler
            # A bound method, because torch's schedulers wrap it in turn.
            step = _by_buckets(sums, self._stepping.step, lambda closure: reader_of_gradients(state, closure))
            self._stepping.step = MethodType(step, self._stepping)  # type: ignore[method-assign]

    def before_forward(self, state: State, logger: Logger) -> None:
        if (sums := sums_of(state.model)) is not None:
            sums.settle()  # before the forward pass adds to gradients that are still in flight

    def fit_end(self, state: State, logger: Logger) -> None:
        self._step_as_before(state)

    def close(self, state: State, logger: Logger) -> None:
        self._give_back()
        self._step_as_before(state)  # also after an exception

    def _step_as_before(self, state: State) -> None:
        """After ``fit``, gradients may be read at any time, so restore the original step."""
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
    """Wrap a module in a DDP that communicates and copies less than torch's defaults; ``settings`` override these:

    - ``gradient_as_bucket_view``: gradients stay in the buckets that are reduced. By default DDP copies each of them
      after the backward pass, when no computation is left to overlap with, and needs memory for a second copy.
    - A communication hook, :class:`GradientSums`: NCCL averages whole buckets, instead of DDP dividing each gradient
      separately before it is sent.
    - Buckets of 64 MiB instead of 25: concurrent matmuls lose as much time as NCCL takes, which is less per byte for
      larger buckets.
    - ``broadcast_buffers`` only if a buffer is part of the state dict: otherwise rank 0 would broadcast buffers such as
      BERT's position ids at each forward pass.
    """
    has_state = not module.state_dict().keys().isdisjoint(name for name, _ in module.named_buffers())
    settings = {"gradient_as_bucket_view": True, "broadcast_buffers": has_state, "bucket_cap_mb": 64} | settings
    model = DistributedDataParallel(module, **settings)
    sums = GradientSums(model.process_group)
    model.register_comm_hook(None, sums.send)
    vars(model)["gradient_sums"] = sums
    return model


def sums_of(model: Any) -> GradientSums | None:
    """The :class:`GradientSums` of a model from :func:`ddp_of`; None for other models."""
    return vars(model).get("gradient_sums")


class GradientSums:
    """DDP's buckets in flight, each of which can be waited for separately.

    DDP waits for all of them before a backward pass returns. The last buckets, which hold the gradients of the
    embeddings, are sent when no computation is left to overlap with. If :attr:`waits` is False they stay in flight, and
    :meth:`settle` must be called before the gradients are read.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self._under_way: list[tuple[list[Tensor], Any]] = []  # parameters of a bucket, and the work to wait for
        self._sent: dict[int, int] = {}  # bytes of each bucket
        self.waits = True  # whether a backward pass returns only when all gradients are complete
        self.overlapped_steps = 0  # optimizer steps that started before the last gradients were complete
        self.reader: str | None = None  # what may read gradients before the step and therefore prevents overlap

    def send(self, state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are text
        """The communication hook: start to average a bucket over the ranks, and report it to DDP as done."""
        gradients = bucket.buffer()
        mean = distributed.ReduceOp.AVG  # NCCL scales while it reads
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
        return [parameter for parameters, _ in self._under_way for parameter in parameters]

    def settle(self) -> None:
        """Make later computation wait for all buckets. The host itself waits only if it computes."""
        for _ in self.arriving():
            pass

    def arriving(self) -> Iterator[list[Tensor]]:
        """Yield the parameters of each bucket in flight when they are complete, in the order in which it was sent."""
        under_way, self._under_way = self._under_way, []
        for parameters, work in under_way:
            work.wait()
            yield parameters

    def summary(self) -> dict[str, Any]:
        """For report.json: bytes reduced per step, and the number of steps that did not wait for all of them."""
        return {
            "buckets": len(self._sent),
            "mib_a_step": sum(self._sent.values()) / 2**20,
            "overlapped_steps": self.overlapped_steps,
            "gradients_read_by": self.reader,
        }


def _whole_steps_for(state: State) -> str | None:
    """A reason, known before the first batch, why a step needs all gradients at once."""
    if state.precision == Precision.AMP_FP16:
        return "fp16's gradient scaler"
    kinds = [type(optimizer) for optimizer in state.optimizers]
    return None if kinds == [torch.optim.AdamW] else f"{', '.join(kind.__name__ for kind in kinds)}, which is not AdamW"


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
        if whole_steps == BUCKETS_SETTLED:  # hooks that observe only the first batches have been removed
            sums.reader = reader(closure)
            sums.waits = sums.reader is not None
            if sums.reader:
                log.warning("DDP: the optimizer's steps wait for all gradients, which %s may read", sums.reader)
        return loss

    return step_by_buckets


@contextmanager
def _parts(optimizer: Optimizer, sums: GradientSums) -> Iterator[Iterator[None]]:
    """For each bucket, limit the optimizer to the parameters whose gradients are complete."""
    groups = optimizer.param_groups
    all_parameters = [group["params"] for group in groups]
    group_of = {id(p): group for group, params in zip(groups, all_parameters, strict=True) for p in params}

    def turns() -> Iterator[None]:
        sent = {id(p) for p in sums.under_way}
        rest = [p for params in all_parameters for p in params if id(p) not in sent]
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
        for group, params in zip(groups, all_parameters, strict=True):
            group["params"] = params

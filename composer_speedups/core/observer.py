"""Observe one training batch: operators, dtypes of matmuls, compilations, this package's kernels, moved parameters."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from composer_speedups.core.compile_counts import compile_counts
from composer_speedups.core.run import FirstBatch, Run
from composer_speedups.core.trainer_state import local_shard
from composer_speedups.kernels.common import counting

_MATMULS = {"mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm"}
_SAMPLE = 64  # values compared in each parameter
# with a smaller rate, a step may be too small to change float32 weights, for example at the start of a warm-up
_MIN_RATE = 1e-6

_open: Observer | None = None  # the one that is observing; an exception in a batch may have left it open


class Operators(TorchDispatchMode):
    """Counts operators, and the dtypes of the results of matrix products, into ``seen``.

    An operator on a tensor subclass, such as torchao's, is counted as ``Subclass.operator``, too.
    """

    supports_higher_order_operators = True

    def __init__(self, seen: FirstBatch) -> None:
        super().__init__()
        self.seen = seen

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True lets Dynamo compile inside the mode; otherwise it skips the frame, also in later batches."""
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """The same for torch before 2.9, in which Dynamo asks this."""
        return not hasattr(TorchDispatchMode, "ignore_compile_internals")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(getattr(func, "overloadpacket", func).__name__)
        self.seen.operators[name] += 1
        for kind in types:
            self.seen.operators[f"{kind.__name__}.{name}"] += 1
        result = func(*args, **(kwargs or {}))
        if name in _MATMULS and isinstance(result, Tensor):
            self.seen.matmul_dtypes.add(_name(result.dtype))
        return result


class Observer:
    """Observes batches of one run, whose counts add up in ``seen``, until the techniques have seen enough.

    ``hears_steps`` registers a global step hook while it observes. Owners that stop it inside such a hook set it to
    False, because torch does not allow removing another hook there.
    """

    def __init__(self, run: Run, *, hears_steps: bool = True) -> None:
        self._hears_steps = hears_steps
        self.seen, self.batches = FirstBatch(), 0
        self._run, self._before = run, compile_counts()
        self._open = contextlib.ExitStack()

    def start(self) -> None:
        global _open
        leave_open()
        _open = self
        self.batches += 1
        self._run.observing = True
        self.seen.steps, self.seen.moved, self.seen.trained = 0, None, 0
        self._rate, self._stepped = 0.0, False
        self._samples = {p: sample(p).clone() for p in self._run.model.parameters() if p.requires_grad}
        self._ran = self._open.enter_context(counting())
        if self._hears_steps:
            handle = register_optimizer_step_post_hook(self.stepped)
            self._open.callback(handle.remove)
        self._open.enter_context(Operators(self.seen))

    def stepped(self, optimizer: Any, *_: Any) -> None:
        """Note a step; called by torch, or by the owner if ``hears_steps`` is False."""
        self._stepped = True
        self.seen.steps += any(optimizer is ours for ours in self._run.optimizers)
        self._rate = max([self._rate, *(float(group["lr"]) for group in optimizer.param_groups)])

    stepped.reads_gradients = False  # type: ignore[attr-defined]  # see distributed.composer_loop

    def outputs(self, outputs: Any) -> None:
        tensors = (leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))
        self.seen.outputs |= {_name(tensor.dtype) for tensor in tensors if tensor.is_floating_point()}

    def stop(self) -> bool:
        """Return whether the optimizer stepped, so that its gradients were finite and not skipped."""
        global _open
        if _open is not self:
            return False
        self._open.close()
        _open, self._run.observing = None, False
        seen = self.seen
        seen.ran += self._ran
        seen.graphs = compile_counts().since(self._before).graphs
        changed = [(sample(p) != old).any() for p, old in self._samples.items() if p.grad is not None]
        self._samples = {}
        seen.trained = len(changed)
        if changed and self._rate >= _MIN_RATE:
            seen.moved = int(torch.stack(changed).sum())
        # a fused optimizer skips a step with infinite gradients itself
        skipped = self._run.precision == "amp_fp16" and seen.moved == 0
        return self._stepped and seen.trained > 0 and not skipped


def in_other_mode() -> bool:
    """Whether the loop traces the model, or has a dispatch mode open, such as FlopCounterMode: torch ends modes in
    reverse order only."""
    mode = _get_current_dispatch_mode()
    return torch.jit.is_tracing() or (mode is not None and not isinstance(mode, Operators))


def leave_open() -> None:
    """Leave the batch that an exception ended while it was observed."""
    if _open is not None:
        _open.stop()


def sample(parameter: Tensor) -> Tensor:
    """A few values of this rank's shard of a parameter."""
    flat = local_shard(parameter.detach()).reshape(-1)
    return flat[:: max(1, len(flat) // _SAMPLE)][:_SAMPLE]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

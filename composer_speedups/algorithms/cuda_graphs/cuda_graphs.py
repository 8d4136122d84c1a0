"""The CUDA graphs technique: the forward pass, the backward pass and the optimizer's step are captured and replayed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from composer_speedups.core.errors import Refusal
from composer_speedups.core.requirements import needs_cuda
from composer_speedups.core.technique import FSDP, Order, Technique

if TYPE_CHECKING:
    from composer_speedups.algorithms.cuda_graphs.graphed_calls import GraphedCalls
    from composer_speedups.algorithms.cuda_graphs.optimizer_step import OptimizerStep
    from composer_speedups.core.run import FirstBatch, Run


class CUDAGraphs(Technique):
    """Replays the training step as CUDA graphs, which saves the host's time of kernel launches.

    The forward and backward pass have graphs per input shape. The step of torch's fused Adam or AdamW has one of its
    own. Other optimizers step as usual, and so does any optimizer under fp16's loss scaling, under hooks, or with
    gradients that were accumulated over micro-batches.

    Raises:
        Refusal: At INIT, without a GPU, under FSDP, with automatic micro-batches, or for a model that DDP already
            wraps; in the first captured batch, if it cannot be captured. That is the first batch that is not observed,
            or the third if DDP keeps gradients in its buckets. In other loops, if training goes on without a capture.

    Source: torch.cuda.make_graphed_callables, whose steps this follows.
    """

    name = "cuda_graphs"
    order = Order.GRAPHS
    effect = "rounding"
    not_with: ClassVar = {FSDP: "captured graphs need whole weights, which FSDP gathers only block by block"}
    fixed_shapes: ClassVar = True

    max_graphs: int = Field(4, ge=1)
    """Maximum number of captured input shapes, in training and again in evaluation; further shapes run eagerly."""

    def reset(self) -> None:
        super().reset()
        self._calls: GraphedCalls | None = None
        self._step: OptimizerStep | None = None
        self._eager_step: str | None = None  # why the optimizer's step is not replayed
        self._in_buckets = False  # whether DDP keeps gradients in its buckets
        self._batches = 0  # number of batches that this process trained with the present parameters

    def needs(self, run: Run) -> Iterable[Refusal]:
        yield from needs_cuda(self.name, run, "capturing graphs")
        if run.microbatch_size == "auto":
            fix = "set trainer.microbatch_size to a number, or remove it"
            yield self.refusal("automatic micro-batches change the captured shapes", fix)

    def engage(self, run: Run) -> dict[str, Any]:
        import torch

        from composer_speedups.algorithms.cuda_graphs.graphed_calls import install

        try:
            calls = install(run.model, self.max_graphs)
        except ValueError as error:
            raise self.refusal(str(error), "remove it") from error
        calls.pool, calls.in_other_loop = torch.cuda.graph_pool_handle(), run.state is None
        calls.paused = lambda: run.observing
        run.give_back(_forget_last_batch, run)
        run.give_back(calls.release)
        self._control(calls)
        self._replay_step(run, calls)
        return {"max_graphs": self.max_graphs}

    def _replay_step(self, run: Run, calls: GraphedCalls) -> None:
        from composer_speedups.algorithms.cuda_graphs.optimizer_step import OptimizerStep, cannot_replay

        optimizer = next(iter(run.optimizers), None)
        self._eager_step = "the loop passed no optimizer" if optimizer is None else cannot_replay(optimizer)
        if self._eager_step is None:
            recorder = partial(calls.recorder, None)
            self._step = OptimizerStep(optimizer, recorder, lambda: run.observing, calls.forget)
            run.give_back(self._step.release)

    def _control(self, calls: GraphedCalls) -> None:
        self._calls = calls
        calls.on_failure, calls.on_outdated = self._cannot_capture, self._wait_for_buckets

    def fit_start(self, run: Run) -> None:
        """Drop the graphs: they would replay the modes, dropout rates and adapters of an earlier fit()."""
        if self._calls is not None:
            self._calls.forget()
            self.epoch_start(run)

    def epoch_start(self, run: Run) -> None:
        """Check once per epoch, not per batch, whether parameters were frozen or thawed, or have hooks."""
        from torch.nn.parallel import DistributedDataParallel

        assert run.state is not None
        assert self._calls is not None
        self._calls.forget_if_frozen()
        parameters: list[Any] = [*run.model.parameters()]
        hooked = any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters)
        ddp = run.state.model if isinstance(run.state.model, DistributedDataParallel) else None
        self._calls.accumulate = ddp is None and not hooked  # only autograd calls these hooks and DDP's
        self._in_buckets = ddp is not None and ddp.gradient_as_bucket_view
        if self._batches == 0:
            self._wait_for_buckets()

    def before_forward(self, run: Run) -> None:
        _forget_last_batch(run)  # its autograd graph belongs to the main stream, on which nothing can be captured

    def batch_end(self, run: Run) -> None:
        from composer_speedups.distributed.ddp import BUCKETS_SETTLED

        assert run.state is not None
        assert self._calls is not None
        self._batches += 1
        if self._calls.held and self._batches == BUCKETS_SETTLED:
            trained = (p for p in run.state.model.parameters() if p.requires_grad)
            self._calls.begin({p: p.grad.detach() for p in trained if p.grad is not None})

    def _wait_for_buckets(self) -> None:
        """If DDP keeps gradients in its buckets, capture once they are final; freezing parameters rebuilds them."""
        assert self._calls is not None
        self._calls.held, self._batches = self._in_buckets, 0
        if self._step is not None:
            self._step.forget()

    def _cannot_capture(self, reason: str, fix: str) -> None:
        from composer_speedups.core.engaging import had_no_effect

        had_no_effect(self, self.refusal(f"the step cannot be captured ({reason})", fix))

    def proof(self, run: Run, seen: FirstBatch) -> Mapping[str, Any]:
        """No evidence yet: the observed batch is not captured. A batch that cannot be captured is refused later."""
        return {"replays": 0}

    def summary(self, run: Run) -> dict[str, Any]:
        calls = self._calls
        assert calls is not None
        if calls.replays == 0 and run.state is not None:  # in other loops, training may go on
            reason, fix = "no training batch replayed a graph", "train longer, and through the model's forward()"
            raise self.no_effect(reason, fix)
        evidence: dict[str, Any] = {name: getattr(calls, name) for name in ("graphs", "replays", "eager_calls")}
        if calls.backward_segments > 1:
            evidence["backward_segments"] = calls.backward_segments
        if self._step is not None:
            evidence["step_replays"] = self._step.replays
        if note := self._eager_step or (self._step and self._step.note):
            evidence["step_is_eager"] = note
        return evidence | {n: v for n in ("eval_graphs", "eval_replays", "eval_note") if (v := getattr(calls, n))}


def _forget_last_batch(run: Run) -> None:
    """Release the last batch's autograd graph, which keeps the captured graphs' memory alive."""
    if run.state is not None:
        run.state.outputs, run.state.loss = None, None  # type: ignore[assignment]  # as before the first batch

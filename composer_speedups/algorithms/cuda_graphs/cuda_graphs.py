"""The CUDA graphs technique: the forward and backward pass are captured and replayed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from composer.core import State
from pydantic import Field
from torch.nn.parallel import DistributedDataParallel

from composer_speedups.algorithms.cuda_graphs.functional import apply_cuda_graphs
from composer_speedups.algorithms.cuda_graphs.graphed_calls import CaptureError, GraphedCalls
from composer_speedups.core.errors import CannotRunError
from composer_speedups.core.requirements import Context, Requirement, needs_cuda
from composer_speedups.core.technique import FSDP, Conflict, Stage, Technique, Variant
from composer_speedups.distributed.ddp import BUCKETS_SETTLED

_NOTED_SHARE = 0.1  # of batches without a graph


class CUDAGraphs(Technique):
    """Replays the forward and backward pass as CUDA graphs, which saves the time of kernel launches.

    Raises:
        TechniqueError: At INIT, without a GPU, under FSDP, with automatic micro-batches, or with a torch_compile mode
            that captures graphs itself; in the first captured batch, if it cannot be captured. That is the second
            batch, or the third if DDP keeps gradients in its buckets.
    """

    name = "cuda_graphs"
    stage = Stage.GRAPHS
    exactness = "rounding"
    conflicts = (
        Conflict(FSDP, "captured graphs need whole weights, which FSDP gathers only block by block"),
        Conflict(
            "torch_compile",
            "torch_compile captures CUDA graphs itself with mode reduce-overhead or max-autotune, or backend "
            "cudagraphs",
            when=lambda self, other: other.makes_graphs,
        ),
    )
    fixed_shapes = True
    gain = 1.04
    trials = (
        Variant({"max_graphs": 16}),  # the other variant has few shapes, because of a large multiple of tokens
        Variant(
            {"max_graphs": 16}, with_techniques={"unpadding": {"pad_to_multiple_of": 512}}, device="cuda", gain=1.1
        ),
    )

    max_graphs: int = Field(4, ge=1)
    """Maximum number of captured input shapes; batches with further shapes run eagerly and are counted."""

    def reset(self) -> None:
        super().reset()
        self._calls: GraphedCalls | None = None
        self._in_buckets = False  # whether DDP keeps gradients in its buckets
        self._batches = 0  # number of batches that this process trained with the present parameters

    def requirements(self, context: Context) -> Iterable[Requirement]:
        yield needs_cuda(context, "capturing graphs")
        yield Requirement(
            context.microbatch_size != "auto",
            "automatic micro-batches change the captured shapes",
            "set trainer.microbatch_size to a number, or remove it",
        )

    def engage(self, state: State) -> dict[str, Any]:
        calls = apply_cuda_graphs(state.model, self.max_graphs)
        calls.pool = torch.cuda.graph_pool_handle()  # Composer runs each backward pass before the next forward
        self._watch_over(calls)
        return {"max_graphs": self.max_graphs}

    def _watch_over(self, calls: GraphedCalls) -> None:
        self._calls = calls
        calls.on_failure, calls.on_outdated = self._cannot_capture, self._wait_for_buckets
        calls.eager_first = 1  # other techniques observe the first forward pass, which a capture would forbid

    def before_forward(self, state: State) -> None:
        # Release the last batch's autograd graph. It belongs to the main stream, on which nothing can be captured.
        state.outputs, state.loss = None, None  # type: ignore[assignment]  # as before the first batch
        assert self._calls is not None
        ddp = state.model if isinstance(state.model, DistributedDataParallel) else None
        self._calls.accumulate = ddp is None  # DDP needs autograd's hooks
        self._in_buckets = ddp is not None and ddp.gradient_as_bucket_view
        if self._batches == 0:
            self._wait_for_buckets()

    def batch_end(self, state: State) -> None:
        assert self._calls is not None
        self._batches += 1
        if self._calls.held and self._batches == BUCKETS_SETTLED:
            trained = (p for p in state.model.parameters() if p.requires_grad)
            self._calls.begin({p: p.grad.detach() for p in trained if p.grad is not None})

    def _wait_for_buckets(self) -> None:
        """If DDP keeps gradients in its buckets, delay capturing, so that graphs write to the final buckets.

        Called before the first forward pass, and in the first one after parameters were frozen or thawed: DDP then has
        new buckets.
        """
        assert self._calls is not None
        self._calls.held, self._batches = self._in_buckets, 0

    def _cannot_capture(self, error: CaptureError) -> None:
        self.unavailable(
            CannotRunError(
                self.name, f"the step cannot be captured ({error})", "remove it, or the code that synchronizes"
            )
        )

    def verify(self, state: State) -> dict[str, Any]:
        assert self._calls is not None
        if self._calls.replays == 0:
            if (self._calls.held or self._calls.eager_calls == 1) and not self.ended:
                return {}  # capturing starts with the next forward pass, or the one after it
            raise self.not_engaged(
                "no training batch replayed a graph", "train longer, and through the model's forward()"
            )
        evidence: dict[str, Any] = {name: getattr(self._calls, name) for name in ("graphs", "replays", "eager_calls")}
        if self._calls.backward_segments > 1:
            evidence["backward_segments"] = self._calls.backward_segments
        eager, batches = self._calls.eager_calls, self._calls.eager_calls + self._calls.replays
        if self.ended and self._calls.graphs == self.max_graphs and eager > _NOTED_SHARE * batches:
            evidence["note"] = (
                f"{eager} of {batches} batches ran without a graph, most of them because there are max_graphs already; "
                "raise max_graphs, or unpadding's pad_to_multiple_of, such as 512, so that fewer shapes occur"
            )
        return evidence

    def close(self) -> None:
        if self._calls is not None:
            self._calls.release()

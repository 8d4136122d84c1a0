"""CUDA graphs of the forward and backward pass."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from composer.core import State
from pydantic import Field
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from composer_speedups.algorithms.cuda_graphs.functional import apply_cuda_graphs
from composer_speedups.algorithms.cuda_graphs.graphed_calls import CaptureError, GraphedCalls
from composer_speedups.core.errors import CannotRunError
from composer_speedups.core.requirements import Context, Requirement, needs_cuda
from composer_speedups.core.technique import FSDP, Conflict, Stage, Technique, Variant
from composer_speedups.distributed.ddp import BUCKETS_SETTLED


class CUDAGraphs(Technique):
    """Replays the forward and backward pass as CUDA graphs, without the time it takes to launch their kernels.

    Raises:
        TechniqueError: At INIT, without a GPU, under FSDP, with automatic micro-batches, or beside a torch_compile
            mode that makes graphs itself; in the first batch that is captured, when it cannot be: the second, or the
            third where DDP keeps gradients in its buckets.
    """

    name = "cuda_graphs"
    stage = Stage.GRAPHS
    exactness = "rounding"
    conflicts = (
        Conflict(FSDP, "graphs are captured of whole weights"),
        Conflict(
            "torch_compile",
            "modes reduce-overhead and max-autotune, and backend cudagraphs, capture graphs themselves",
            when=lambda self, other: other.makes_graphs,
        ),
    )
    fixed_shapes = True
    gain = 1.04
    trials = (
        Variant({"max_graphs": 16}),  # and with a multiple of tokens so large that there are few shapes
        Variant(
            {"max_graphs": 16}, with_techniques={"unpadding": {"pad_to_multiple_of": 512}}, device="cuda", gain=1.1
        ),
    )

    max_graphs: int = Field(4, ge=1)
    """Input shapes captured; batches of further shapes run as before and are counted."""

    def reset(self) -> None:
        super().reset()
        self._calls: GraphedCalls | None = None
        self._batches = 0  # trained by this process

    def requirements(self, context: Context) -> Iterable[Requirement]:
        yield needs_cuda(context, "capturing graphs")
        yield Requirement(
            context.microbatch_size != "auto",
            "automatic micro-batches change the shapes that were captured",
            "give trainer.microbatch_size a number, or remove it",
        )

    def engage(self, state: State) -> dict[str, Any]:
        self._calls = apply_cuda_graphs(state.model, self.max_graphs)
        self._calls.on_failure = self._cannot_capture
        self._calls.pool = torch.cuda.graph_pool_handle()  # Composer runs each backward pass before the next forward
        self._calls.eager_first = 1  # other techniques watch the first forward pass, in ways a capture forbids
        return {"max_graphs": self.max_graphs}

    def before_forward(self, state: State) -> None:
        # What is left of the last backward pass belongs to the main stream, where nothing can be captured.
        state.outputs, state.loss = None, None  # type: ignore[assignment]  # as before the first batch
        self._wait_for_buckets(state.model)

    def batch_end(self, state: State) -> None:
        assert self._calls is not None
        self._batches += 1
        if self._calls.held and self._batches == BUCKETS_SETTLED:
            trained = (p for p in state.model.parameters() if p.requires_grad)
            self._calls.begin({p: p.grad.detach() for p in trained if p.grad is not None})

    def _wait_for_buckets(self, model: nn.Module) -> None:
        """Where DDP keeps gradients in its buckets, graphs write them there, and DDP copies none of them."""
        if self._calls is not None and self._batches == 0 and isinstance(model, DistributedDataParallel):
            self._calls.held = model.gradient_as_bucket_view

    def _cannot_capture(self, error: CaptureError) -> None:
        self.unavailable(
            CannotRunError(self.name, f"the step cannot be captured ({error})", "remove it, or what waits for the GPU")
        )

    def verify(self, state: State) -> dict[str, Any]:
        assert self._calls is not None
        if self._calls.replays == 0:
            if (self._calls.held or self._calls.eager_calls == 1) and not self.ended:
                return {}  # the next forward pass is the first to be captured, or the one after it
            raise self.not_engaged(
                "no training batch replayed a graph", "train longer, and through the model's forward()"
            )
        found: dict[str, Any] = {name: getattr(self._calls, name) for name in ("graphs", "replays", "eager_calls")}
        if self._calls.backward_segments > 1:
            found["backward_segments"] = self._calls.backward_segments
        if self.ended and found["eager_calls"] > found["replays"]:
            found["note"] = "most batches had a shape of their own; raise max_graphs, or round the shapes"
        return found

    def close(self) -> None:
        if self._calls is not None:
            self._calls.release()

"""The SDPA technique: torch's scaled_dot_product_attention in place of eager attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, Literal

import torch
from composer.core import State, get_precision_context
from pydantic import Field
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from composer_speedups.algorithms.sdpa_attention.functional import apply_sdpa_attention, registered_name
from composer_speedups.core.errors import CannotRunError, TechniqueError
from composer_speedups.core.operator_recorder import OperatorRecorder, cannot_run
from composer_speedups.core.parity_checked_technique import ParityCheckedTechnique
from composer_speedups.core.requirements import Context, Requirement, needs_cuda
from composer_speedups.core.stock import outermost_models
from composer_speedups.core.technique import Stage
from composer_speedups.core.trainer_state import compute_dtype, device_of, is_compiled
from composer_speedups.families.family import config_value
from composer_speedups.packing.untouched import remember_attention

_CHANGED_BY = "_sdpa_attention_of"  # attribute of a model: owner of the change, and the attention before it


class SDPAAttention(ParityCheckedTechnique):
    """Replaces eager attention by scaled_dot_product_attention, by default with the kernel that torch chooses.

    Raises:
        TechniqueError: At INIT, if there is no Hugging Face model, one does not support SDPA, or the backend needs a
            GPU; in the first batch, if the kernel cannot run with its shapes and mask (with ``"warn"``, training
            continues with the previous attention).
    """

    name = "sdpa_attention"
    stage = Stage.SURGERY
    exactness = "rounding"
    gain = 1.5

    backend: Literal["auto", "flash", "efficient", "cudnn", "math"] = Field("auto")
    """The only allowed kernel; auto lets torch choose."""

    def reset(self) -> None:
        super().reset()
        self._kernel: str | None = None
        self._seen_in = "probe"
        self._recorder: OperatorRecorder | None = None
        self._before: dict[PreTrainedModel, str] = {}  # each model's previous attention

    def requirements(self, context: Context) -> Iterable[Requirement]:
        if self.backend in ("flash", "efficient", "cudnn"):
            yield needs_cuda(context, f"the {self.backend} kernel", (8, 0))

    def engage(self, state: State) -> dict[str, Any]:
        models = outermost_models(state.model).values()
        if not models:
            raise TechniqueError(self.name, "the model has no Hugging Face model", "remove it")
        implementations = {module: module.config._attn_implementation or "eager" for module in models}
        with self.refusals("remove it"):
            apply_sdpa_attention(state.model, self.backend)
        for module, implementation in implementations.items():
            # Take over changes of an earlier Trainer's technique that is not closed.
            earlier = vars(module).get(_CHANGED_BY)
            self._before.setdefault(module, implementation if earlier is None else earlier[1])
            vars(module)[_CHANGED_BY] = (id(self), self._before[module])
        return {"backend": self.backend, "implementation_before": ", ".join(sorted(set(implementations.values())))}

    def withdraw(self, state: State) -> None:
        for module, before in self._before.items():
            if module.config._attn_implementation == registered_name(self.backend) and self._owns(module):
                module.set_attn_implementation(before)
                for inside in module.modules():
                    remember_attention(inside, None)

    def _owns(self, module: PreTrainedModel) -> bool:
        return vars(module).get(_CHANGED_BY, (None,))[0] == id(self)

    @property
    def compare_in_training_precision(self) -> bool:
        return self.backend != "auto"  # some kernels support only 16 bits

    def watch(self, state: State) -> None:
        """Record which kernel the first forward pass runs.

        First, a probe calls the attention function with this batch's shapes and mask, to distinguish a kernel that
        cannot run from other errors. Compiled code cannot be recorded; there, the probe is the evidence.
        """
        if self._kernel is not None:
            return
        reason = f"the {self.backend} kernel cannot run on the first batch"
        try:
            with cannot_run(self.name, reason, "use backend: auto"):
                self._kernel = self._kernel_for(state)
        except CannotRunError as error:
            self._restore_attention(error)
            return
        if not is_compiled(state.model):
            self._recorder = self.watching.enter_context(OperatorRecorder())

    def stop_watching(self, state: State) -> None:
        if self._recorder is not None:
            self._kernel, self._seen_in, self._recorder = _kernel_among(self._recorder), "forward pass", None

    def _restore_attention(self, error: CannotRunError) -> None:
        """Stop, or continue with the previous attention; if that also used this kernel, with eager attention."""
        self.unavailable(error)
        for module, before in self._before.items():
            module.set_attn_implementation("eager" if before == registered_name(self.backend) else before)
        self.evidence["going_on_with"] = ", ".join(sorted({m.config._attn_implementation for m in self._before}))

    def close(self) -> None:
        super().close()
        for module in self._before:
            if self._owns(module):
                del vars(module)[_CHANGED_BY]

    def _kernel_for(self, state: State) -> str | None:
        """Run the attention function on random queries with this batch's shape and mask, and return the kernel that
        ran; None for unknown kinds of batches and models."""
        model, device = next(iter(outermost_models(state.model).values())), device_of(state)
        config = model.config
        inputs = _shape_and_mask(config, state.batch)
        if inputs is None:
            return None
        shape, mask = inputs
        if mask is not None and not is_compiled(state.model) and bool(mask.all()):
            mask = None  # like transformers, except during tracing
        if mask is not None:
            mask = mask.expand(-1, -1, shape[2], -1).to(device)
        function = AttentionInterface().get(config._attn_implementation)
        if function is None:  # eager attention is not registered
            return str(config._attn_implementation)
        bidirectional: Any = SimpleNamespace(is_causal=False)  # if no attention module has is_causal
        attention = next((m for m in model.modules() if hasattr(m, "is_causal")), bidirectional)
        recorder = OperatorRecorder()
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices), get_precision_context(state.precision, state.precision_config):
            query = torch.randn(shape, device=device, dtype=compute_dtype(state), requires_grad=True)
            with recorder:
                function(attention, query, query, query, mask, dropout=config_value(config, "attention_dropout", 0.0))
        return _kernel_among(recorder)

    def verify(self, state: State) -> dict[str, Any]:
        implementations = {m.config._attn_implementation for m in outermost_models(state.model).values()}
        if implementations != {registered_name(self.backend)}:
            raise self.not_engaged(
                f"the model's attention is {', '.join(map(str, implementations))}", "do not change it after INIT"
            )
        if self._kernel is None:
            raise self.not_engaged("the forward pass ran no SDPA kernel", "remove it for this model")
        if self.backend not in ("auto", *self._kernel.split("_")):
            raise self.not_engaged(f"the kernel that ran is {self._kernel}", "use backend: auto")
        return {"kernel": self._kernel, "kernel_seen_in": self._seen_in}


def _shape_and_mask(config: Any, batch: Any) -> tuple[tuple[int, ...], torch.Tensor | None] | None:
    """Return the shape of a batch's queries (rows, heads, tokens, units), and its mask, bool (rows, 1, 1, tokens), or
    None if it has none; only None for unknown kinds of batches and models."""
    heads = getattr(config, "num_attention_heads", None)  # DistilBERT's config also has BERT's names
    if heads is None or not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), torch.Tensor):
        return None
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    if mask is not None and mask.shape != ids.shape:
        return None
    length = ids.shape[-1]
    rows = ids.numel() // length  # a multiple-choice model flattens (questions, choices)
    shape = (rows, heads, length, config.hidden_size // heads)
    return shape, None if mask is None else mask.reshape(rows, 1, 1, length).bool()


def _kernel_among(recorder: OperatorRecorder) -> str | None:
    """Return the SDPA kernel among the operators that ran; None if there is none."""
    fused = [op.strip("_") for op in recorder.counts if op.startswith("_scaled_dot_product")]
    if fused:
        return fused[0]
    # The math kernel is decomposed before dispatch; no other attention uses this softmax.
    return "scaled_dot_product_attention_math" if "_safe_softmax" in recorder.counts else None

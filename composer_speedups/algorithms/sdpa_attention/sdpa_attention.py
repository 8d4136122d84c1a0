"""torch's scaled_dot_product_attention in place of eager attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
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
from composer_speedups.core.technique import Stage
from composer_speedups.core.trainer_state import compute_dtype, device_of, is_compiled
from composer_speedups.families.family import config_value
from composer_speedups.families.stock import outermost_models

_CHANGED_BY = "_sdpa_attention_of"  # attribute of a model: whose technique changed it, and what it had before


class SDPAAttention(ParityCheckedTechnique):
    """scaled_dot_product_attention in place of eager attention, by default with the kernel torch chooses.

    Raises:
        TechniqueError: At INIT, when no Hugging Face model is found, when one does not support SDPA, or when the
            backend needs a GPU; in the first batch, when the kernel cannot run on its shapes and mask (with
            ``"warn"``, the model goes on with the attention that it had).
    """

    name = "sdpa_attention"
    stage = Stage.SURGERY
    exactness = "rounding"
    gain = 1.5

    backend: Literal["auto", "flash", "efficient", "cudnn", "math"] = Field("auto")
    """The one kernel allowed; auto lets torch choose."""

    def reset(self) -> None:
        super().reset()
        self._kernel: str | None = None
        self._seen_in = "probe"
        self._recorder: OperatorRecorder | None = None
        self._recording = ExitStack()
        self._before: dict[PreTrainedModel, str] = {}  # what each had

    def requirements(self, context: Context) -> Iterable[Requirement]:
        if self.backend in ("flash", "efficient", "cudnn"):
            yield needs_cuda(context, f"the {self.backend} kernel", (8, 0))

    def engage(self, state: State) -> dict[str, Any]:
        models = outermost_models(state.model).values()
        if not models:
            raise TechniqueError(self.name, "the model holds no Hugging Face model", "remove it")
        found = {module: module.config._attn_implementation or "eager" for module in models}
        with self.refusals("remove it"):
            self.reapply(state)
        for module, implementation in found.items():
            # What an earlier Trainer's technique changed, which has not ended yet, is taken over.
            earlier = vars(module).get(_CHANGED_BY)
            self._before.setdefault(module, implementation if earlier is None else earlier[1])
            vars(module)[_CHANGED_BY] = (self.owner, self._before[module])
        return {"backend": self.backend, "implementation_before": ", ".join(sorted(set(found.values())))}

    def reapply(self, state: State) -> None:
        apply_sdpa_attention(state.model, self.backend)

    def withdraw(self, state: State) -> None:
        for module, before in self._before.items():
            if module.config._attn_implementation == registered_name(self.backend) and self._owns(module):
                module.set_attn_implementation(before)

    def _owns(self, module: PreTrainedModel) -> bool:
        return vars(module).get(_CHANGED_BY, (None,))[0] == self.owner

    @property
    def compares_in_the_runs_precision(self) -> bool:
        return self.backend != "auto"  # some kernels take 16 bits alone

    def watch(self, state: State) -> None:
        """See which kernel the first forward pass runs.

        A probe of the attention function on this batch's shapes and mask comes first: it tells a kernel that
        cannot run here from any other failure. Compiled code cannot be recorded, and there the probe decides.
        """
        if self._kernel is not None:
            return
        reason = f"the {self.backend} kernel cannot run on the first batch"
        try:
            with cannot_run(self.name, reason, "use backend: auto"):
                self._kernel = self._kernel_for(state)
        except CannotRunError as error:
            self._go_back(error)
            return
        if not is_compiled(state.model):
            self._recorder = self._recording.enter_context(OperatorRecorder())

    def stop_watching(self, state: State) -> None:
        self._recording.close()
        if self._recorder is not None:
            self._kernel, self._seen_in, self._recorder = _kernel_among(self._recorder), "forward pass", None

    def _go_back(self, error: CannotRunError) -> None:
        """Stop, or train with the attention that the model had; with eager where that was this kernel too."""
        self.unavailable(error)
        for module, before in self._before.items():
            module.set_attn_implementation("eager" if before == registered_name(self.backend) else before)
        self.evidence["going_on_with"] = ", ".join(sorted({m.config._attn_implementation for m in self._before}))

    def close(self) -> None:
        self._recording.close()  # of a forward pass that raised
        super().close()
        for module in self._before:
            if self._owns(module):
                del vars(module)[_CHANGED_BY]

    def _kernel_for(self, state: State) -> str | None:
        """The kernel that this batch's shapes and mask get; None for batches and models it cannot read."""
        model = next(iter(outermost_models(state.model).values()))
        device, config, batch = device_of(state), model.config, state.batch
        heads = getattr(config, "num_attention_heads", None)  # DistilBERT's config maps its own names to BERT's
        if heads is None or not isinstance(batch, Mapping) or not isinstance(batch.get("input_ids"), torch.Tensor):
            return None
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        if mask is not None and mask.shape != ids.shape:
            return None
        length = ids.shape[-1]
        rows = ids.numel() // length  # a multiple-choice model's are (questions, choices), which it flattens
        shape = (rows, heads, length, config.hidden_size // heads)
        if mask is not None and not is_compiled(state.model) and bool(mask.all()):
            mask = None  # as transformers does, except while tracing
        if mask is not None:
            mask = mask.reshape(rows, 1, 1, length).bool().expand(rows, 1, length, length).to(device)
        function = AttentionInterface().get(config._attn_implementation)
        if function is None:  # eager attention is no entry there
            return str(config._attn_implementation)
        bidirectional: Any = SimpleNamespace(is_causal=False)  # for an attention module that does not say
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
                f"the model's attention is {', '.join(map(str, implementations))}", "leave it after INIT"
            )
        if self._kernel is None:
            raise self.not_engaged("the forward pass ran none of its kernels", "remove it for this model")
        if self.backend not in ("auto", *self._kernel.split("_")):
            raise self.not_engaged(f"the kernel that ran is {self._kernel}", "use backend: auto")
        return {"kernel": self._kernel, "kernel_seen_in": self._seen_in}


def _kernel_among(recorder: OperatorRecorder) -> str | None:
    """The SDPA kernel among the operators that ran; None when attention was none of SDPA's."""
    fused = [op.strip("_") for op in recorder.counts if op.startswith("_scaled_dot_product")]
    if fused:
        return fused[0]
    # The math kernel comes apart before it is dispatched; no other attention takes this softmax.
    return "scaled_dot_product_attention_math" if "_safe_softmax" in recorder.counts else None

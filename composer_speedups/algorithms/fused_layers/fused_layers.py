"""Each encoder layer as one autograd function with fused kernels, on packed tokens."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

import torch
from composer.core import Event, Precision, State
from composer.loggers import Logger
from torch import nn
from transformers import PreTrainedModel

from composer_speedups.algorithms.fused_layers.embedding_families import EMBEDDINGS, FusedEmbeddings
from composer_speedups.algorithms.fused_layers.families import FAMILIES, FusedLayer
from composer_speedups.algorithms.fused_layers.shape import Shape
from composer_speedups.algorithms.requirements import Context, Requirement, needs_autocast, needs_cuda
from composer_speedups.algorithms.surgery import swap_class
from composer_speedups.algorithms.technique import OnUnavailable, Stage, Technique
from composer_speedups.algorithms.unpadding.encoders import UnpaddedEncoder, unpadded_encoders
from composer_speedups.errors import TechniqueError
from composer_speedups.state import device_of

__all__ = ["FusedLayers", "apply_fused_layers"]

_OWN = "fused_layers computes the whole layer itself"
_SIZES = (16, 32, 64, 128)
# Their heads read the first token of each row, and nothing else of the last layer.
_FIRST_TOKEN_HEADS = {f"{family}ForSequenceClassification" for family in ("Bert", "Roberta", "Electra", "DistilBert")}


def apply_fused_layers(model: nn.Module, last_layer: Literal["needed", "all"] = "needed") -> list[str]:
    """Make the encoder layers of an unpadded model compute with fused kernels.

    Args:
        model: What :func:`apply_unpadding` changed; changed in place. Its parameters, their names and its
            ``state_dict`` stay.
        last_layer: ``"needed"`` computes in the last layer only what the head reads, where that is known to be each
            row's first token; ``"all"`` computes it like the others.

    Returns:
        Names of the layers changed; those that already were are left out.

    Raises:
        ValueError: The model has no unpadded encoder, or layers that the kernels cannot take, or has another
            ``last_layer`` already.
    """
    if last_layer not in ("needed", "all"):
        raise ValueError(f"last_layer must be 'needed' or 'all', not {last_layer!r}")
    encoders = unpadded_encoders(model)
    if not encoders:
        raise ValueError("fused_layers computes packed tokens, and the model has no unpadded encoder; add unpadding")
    for encoder in encoders:
        _check(encoder)
    fused = [layer for layer in model.modules() if isinstance(layer, FusedLayer)]
    wanted = last_layer == "needed" and _reads_first_tokens_only(model)
    if fused and wanted != any(layer.first_tokens_only for layer in fused):
        other = "all" if wanted else "needed"
        raise ValueError(f"the model's layers are fused already, with last_layer={other!r} and not {last_layer=}")
    names = [name for old, new in (FAMILIES | EMBEDDINGS).items() for name in swap_class(model, old, new)]
    for encoder in encoders:
        encoder.layer[-1].first_tokens_only = wanted  # type: ignore[assignment]
    return names


def _check(encoder: UnpaddedEncoder) -> None:
    config = encoder.model_config
    activation = getattr(config, "hidden_act", getattr(config, "activation", None))
    if activation != "gelu":
        raise ValueError(f"fused_layers knows the exact GELU, and this model's activation is {activation!r}")
    size = config.hidden_size // config.num_attention_heads
    if size not in _SIZES:
        raise ValueError(f"fused_layers takes heads of {', '.join(map(str, _SIZES))} units, and these have {size}")
    for layer in encoder.layer:
        if type(layer) not in FAMILIES and not isinstance(layer, FusedLayer):
            raise ValueError(f"fused_layers does not know {type(layer).__name__}; it knows BERT's family of layers")
        for module in layer.modules():
            if isinstance(module, nn.Linear | nn.LayerNorm) and type(module) not in (nn.Linear, nn.LayerNorm):
                raise ValueError(f"{_OWN}, and its {type(module).__name__} has a forward of its own")


def _reads_first_tokens_only(model: nn.Module) -> bool:
    outermost = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    known = outermost is not None and type(outermost).__module__.startswith("transformers.models.")
    return known and type(outermost).__name__ in _FIRST_TOKEN_HEADS


class FusedLayers(Technique):
    """Each encoder layer as one function: one QKV product, and fused kernels for all that is no matrix product.

    Args:
        last_layer: ``"needed"`` (default) computes in the last layer only what a classification head reads, each
            row's first token; ``"all"`` computes it like the others.
        on_unavailable: See :class:`Technique`.

    Raises:
        ValueError: Another ``last_layer``.
        TechniqueError: At INIT, without ``unpadding``, for a model whose layers the kernels cannot take, and on a
            GPU in fp32 or without Triton.
    """

    name = "fused_layers"
    stage = Stage.KERNELS
    clashes: ClassVar[dict[str, str]] = {
        "fast_layernorm": f"{_OWN}, LayerNorms included",
        "float8_linear": f"{_OWN}, matrix products included",
        "lora": f"{_OWN}, and would leave the adapters out",
        "sparse_upcycling": f"{_OWN}, and would leave the experts out",
        "torch_compile": f"{_OWN}, with kernels that are compiled already",
    }

    def __init__(
        self, last_layer: Literal["needed", "all"] = "needed", *, on_unavailable: OnUnavailable = "stop"
    ) -> None:
        super().__init__(on_unavailable=on_unavailable)
        if last_layer not in ("needed", "all"):
            raise ValueError(f"last_layer must be 'needed' or 'all', not {last_layer!r}")
        self.last_layer = last_layer
        self._layers: list[FusedLayer] = []
        self._embeddings: list[FusedEmbeddings] = []
        self._compiling: Any = None  # a Compiling, whose module imports Triton

    def requirements(self, context: Context) -> Iterable[Requirement]:
        yield Requirement(
            "unpadding" in context.techniques, "it computes packed tokens, and nothing packs them", "add unpadding"
        )
        if context.device.type == "cuda":
            yield needs_autocast(context, "its kernels compute in 16 bits: it")
            yield needs_cuda(context, "a Triton kernel", (8, 0))
            found = importlib.util.find_spec("triton") is not None
            yield Requirement(found, "the package 'triton' is not installed", "pip install 'triton'")

    def engage(self, state: State) -> dict[str, Any]:
        try:
            apply_fused_layers(state.model, self.last_layer)
        except ValueError as error:
            raise TechniqueError(self.name, str(error), "take it out for this model") from error
        self._layers = [layer for layer in state.model.modules() if isinstance(layer, FusedLayer)]
        self._embeddings = [module for module in state.model.modules() if isinstance(module, FusedEmbeddings)]
        device = device_of(state)
        if device.type == "cuda":
            from composer_speedups.algorithms.fused_layers.compile_ahead import compile_ahead

            dtype = torch.float16 if state.precision == Precision.AMP_FP16 else torch.bfloat16
            shape = Shape.of_modules(self._layers[0], next(iter(self._embeddings), None))
            self._compiling = compile_ahead(shape, dtype, device)
        return {"layers": len(self._layers)}

    def match(self, event: Event, state: State) -> bool:
        return super().match(event, state) or (event == Event.FIT_START and self._compiling is not None)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.FIT_START and getattr(state.train_dataloader, "num_workers", None):
            self._compiling.close()  # workers are forked next, with whatever lock a thread holds
        super().apply(event, state, logger)

    def observe(self, event: Event, state: State) -> None:
        if self._compiling is not None and event == Event.BEFORE_FORWARD:
            self._compiling.wait()
        elif self._compiling is not None:
            self._compiling.close()  # nothing may be launched beside a capture of CUDA graphs, which may come next

    def close(self) -> None:
        if self._compiling is not None:
            self._compiling.close(cancel=True)

    def verify(self, state: State) -> dict[str, Any]:
        ran = [layer.ran for layer in self._layers]
        wrong = [way for way in ran if way in (None, "stock")]
        if wrong:
            went = "not at all" if wrong[0] is None else "as the stock model's"
            raise self.not_engaged(f"{len(wrong)} of {len(ran)} layers ran {went}", "keep unpadding engaged")
        ways = {way: ran.count(way) for way in sorted(set(filter(None, ran)))}
        return {
            "layers_ran": ", ".join(f"{count} {way}" for way, count in ways.items()),
            "embeddings_ran": ", ".join(sorted({module.ran or "not at all" for module in self._embeddings})),
        }

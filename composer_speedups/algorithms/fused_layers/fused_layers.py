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

from composer_speedups.algorithms.compared_technique import Check, ComparedTechnique
from composer_speedups.algorithms.fused_layers.embedding_families import EMBEDDINGS, FusedEmbeddings
from composer_speedups.algorithms.fused_layers.families import FAMILIES, FusedLayer
from composer_speedups.algorithms.fused_layers.first_tokens import mark_calls, unmark_calls
from composer_speedups.algorithms.fused_layers.shape import Shape
from composer_speedups.algorithms.requirements import Context, Requirement, needs_autocast, needs_cuda
from composer_speedups.algorithms.stock import Untouched, built_on_meta, differences
from composer_speedups.algorithms.technique import OnUnavailable, Stage
from composer_speedups.algorithms.unpadding.encoders import unpadded_encoders
from composer_speedups.errors import TechniqueError
from composer_speedups.state import device_of

__all__ = ["FusedLayers", "apply_fused_layers", "undo_fused_layers", "unfused_layers"]

_OWN = "fused_layers computes the whole layer itself"
_SIZES = (16, 32, 64, 128)
_STOCK: dict[type[nn.Module], type[nn.Module]] = {v: k for k, v in {**FAMILIES, **EMBEDDINGS}.items()}
_KNOWN = "BERT, RoBERTa, ELECTRA and DistilBERT"


def apply_fused_layers(model: nn.Module, last_layer: Literal["needed", "all"] = "needed") -> list[str]:
    """Make the encoder layers of an unpadded model compute with fused kernels.

    A layer is fused only if it is exactly what transformers builds from the model's configuration. One that holds
    anything else (a PEFT adapter, a hook, another activation, a quantised or pruned weight) runs its own forward on the
    packed tokens, and so does one to which that happens later.

    Args:
        model: What :func:`apply_unpadding` changed; changed in place. Its parameters, their names and its
            ``state_dict`` stay.
        last_layer: ``"needed"`` computes in the last layer only what the head reads, where that is known to be each
            row's first token, and where the model is called through that head; ``"all"`` computes it like the others.

    Returns:
        Names of the layers and embeddings changed; those that already were are left out.

    Raises:
        ValueError: The model has no unpadded encoder, or no layer that the kernels can take, or has another
            ``last_layer`` already.
    """
    return _fuse(model, last_layer)


def _fuse(model: nn.Module, last_layer: Literal["needed", "all"], owner: int | None = None) -> list[str]:
    """:func:`apply_fused_layers`; ``owner`` takes over what another one owns."""
    if last_layer not in ("needed", "all"):
        raise ValueError(f"last_layer must be 'needed' or 'all', not {last_layer!r}")
    encoders = unpadded_encoders(model)
    if not encoders:
        raise ValueError("fused_layers computes packed tokens, and the model has no unpadded encoder; add unpadding")
    layers = _layers(model)
    fused = [layer for layer in layers.values() if isinstance(layer, FusedLayer)]
    for layer in fused:
        if layer.last_layer != last_layer:
            raise ValueError(
                f"the model's layers are fused already, with last_layer={layer.last_layer!r} and not {last_layer=}"
            )
    reasons = unfused_layers(model)
    if not fused and len(reasons) == len(layers):
        raise ValueError(f"fused_layers can fuse none of the layers: {next(iter(reasons.values()))}")
    names = []
    for name, module in model.named_modules():
        stock = type(module)
        if (name in layers and name not in reasons and stock in FAMILIES) or (
            stock in EMBEDDINGS and not _why_not(module, name, _config_around(model, name))
        ):
            module.untouched = Untouched.inside(module)  # type: ignore[assignment]
            module.__class__ = {**FAMILIES, **EMBEDDINGS}[stock]
            module.owner = owner  # type: ignore[assignment]
            names.append(name)
        if isinstance(module, FusedLayer):
            module.last_layer = last_layer
        if isinstance(module, FusedLayer | FusedEmbeddings) and module.owner is not None:
            module.owner = owner
    inner = {id(layer) for encoder in encoders for layer in [*encoder.layer][:-1]}  # one may stand in several places
    for layer in layers.values():
        if isinstance(layer, FusedLayer):
            layer.is_last = id(layer) not in inner
    if last_layer == "needed":
        mark_calls(model)
    return names


def undo_fused_layers(model: nn.Module) -> list[str]:
    """Give layers and embeddings their own classes back; returns the names of those changed."""
    return _unfuse(model)


def _unfuse(model: nn.Module, owner: int | None = None) -> list[str]:
    """:func:`undo_fused_layers`, of those that ``owner`` owns; None for all."""
    names = []
    for name, module in model.named_modules():
        if isinstance(module, FusedLayer | FusedEmbeddings) and owner in (None, module.owner):
            module.__class__ = _STOCK[type(module)]  # type: ignore[assignment]
            for attribute in ("untouched", "last_layer", "is_last", "owner", "ran"):
                vars(module).pop(attribute, None)
            names.append(name)
    if not any(isinstance(module, FusedLayer) for module in model.modules()):
        unmark_calls(model)
    return names


def unfused_layers(model: nn.Module) -> dict[str, str]:
    """Layers of a model's unpadded encoders that cannot be fused, or were changed since, by name, and why."""
    encoders = {id(layer): encoder for encoder in unpadded_encoders(model) for layer in encoder.layer}
    found, built = {}, dict[Any, nn.Module]()
    for name, layer in _layers(model).items():
        config = encoders[id(layer)].model_config
        if isinstance(layer, FusedLayer):
            reason = None if layer.untouched.still() else _why_not(layer, name, config, built) or f"{name} was changed"
        else:
            reason = _unsupported(config, layer) or _why_not(layer, name, config, built)
        if reason:
            found[name] = reason
    return found


def _layers(model: nn.Module) -> dict[str, Any]:
    wanted = {id(layer) for encoder in unpadded_encoders(model) for layer in encoder.layer}
    return {name: module for name, module in model.named_modules() if id(module) in wanted}


def _unsupported(config: Any, layer: nn.Module) -> str | None:
    if type(layer) not in FAMILIES:
        return f"fused_layers knows the layers of {_KNOWN}, and this model's are {type(layer).__name__}"
    activation = getattr(config, "hidden_act", getattr(config, "activation", None))
    if activation != "gelu":
        return f"fused_layers knows the exact GELU, and this model's activation is {activation!r}"
    size = config.hidden_size // config.num_attention_heads
    if size not in _SIZES:
        return f"fused_layers takes heads of {', '.join(map(str, _SIZES))} units, and these have {size}"
    return None


def _why_not(module: nn.Module, name: str, config: Any, built: dict[Any, nn.Module] | None = None) -> str | None:
    """How a layer, or the embeddings, differ from what transformers builds; the first of the differences.

    ``built`` keeps what was built for the comparison, for the next module of the class.
    """
    built = {} if built is None else built
    kind = (type(module), id(config))
    if kind not in built:
        built[kind] = built_on_meta(type(module), config)
    return next(differences(module, built[kind], name, around=True), None)


def _config_around(model: nn.Module, name: str) -> Any:
    """The configuration of the innermost model of transformers around a module."""
    around = [
        (outer, module)
        for outer, module in model.named_modules()
        if isinstance(module, PreTrainedModel) and (outer == "" or name.startswith(f"{outer}."))
    ]
    return around[-1][1].config


class FusedLayers(ComparedTechnique):
    """Each encoder layer as one function: one QKV product, and fused kernels for all that is no matrix product.

    Args:
        last_layer: ``"needed"`` (default) computes in the last layer only what a classification head reads, each
            row's first token; ``"all"`` computes it like the others.
        check: See :class:`ComparedTechnique`.
        on_unavailable: See :class:`Technique`.

    Raises:
        ValueError: Another ``last_layer``.
        TechniqueError: At INIT, without ``unpadding``, for a model none of whose layers the kernels can take, and on a
            GPU in fp32 or without Triton; in the first batch, for a model of one's own that then computes something
            else.
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
        self,
        last_layer: Literal["needed", "all"] = "needed",
        check: Check = "auto",
        *,
        on_unavailable: OnUnavailable = "stop",
    ) -> None:
        super().__init__(check=check, on_unavailable=on_unavailable)
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
            self.reapply(state)
        except ValueError as error:
            reason = str(error).removeprefix("fused_layers ")  # the error says the name itself
            raise TechniqueError(self.name, reason, "take it out for this model") from error
        device = device_of(state)
        if device.type == "cuda":
            from composer_speedups.algorithms.fused_layers.compile_ahead import compile_ahead

            dtype = torch.float16 if state.precision == Precision.AMP_FP16 else torch.bfloat16
            shape = Shape.of_modules(self._layers[0], next(iter(self._embeddings), None))
            self._compiling = compile_ahead(shape, dtype, device)
        unfused = unfused_layers(state.model)
        return {"layers": len(self._layers), **({"unfused": unfused} if unfused else {})}

    def reapply(self, state: State) -> None:
        _fuse(state.model, self.last_layer, self.owner)
        self._layers = [layer for layer in state.model.modules() if isinstance(layer, FusedLayer)]
        self._embeddings = [module for module in state.model.modules() if isinstance(module, FusedEmbeddings)]

    def withdraw(self, state: State) -> None:
        _unfuse(state.model, self.owner)

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
        super().close()

    def verify(self, state: State) -> dict[str, Any]:
        ran = [layer.ran for layer in self._layers]
        wrong = [way for way in ran if way in (None, "stock")]
        if wrong:
            went = "not at all" if wrong[0] is None else "as the stock model's"
            raise self.not_engaged(f"{len(wrong)} of {len(ran)} layers ran {went}", "keep unpadding engaged")
        unfused = unfused_layers(state.model)
        if set(ran) == {"unfused"}:
            reason = f"no layer ran fused ({next(iter(unfused.values()), 'they were changed')})"
            raise self.not_engaged(reason, "leave the layers as they are after INIT")
        ways = {way: ran.count(way) for way in sorted(set(filter(None, ran)))}
        return {
            **({"unfused": unfused} if unfused else {}),
            "layers_ran": ", ".join(f"{count} {way}" for way, count in ways.items()),
            "embeddings_ran": ", ".join(sorted({module.ran or "not at all" for module in self._embeddings})),
        }

"""The encoder's matmuls in float8."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable
from types import ModuleType
from typing import Any, ClassVar, Literal

import torch
from composer.core import Event, Precision, State, get_precision_context
from torch import nn

from composer_speedups.algorithms.applied import refuse_other_settings
from composer_speedups.algorithms.probe import OperatorRecorder, cannot_run
from composer_speedups.algorithms.requirements import (
    Context,
    Requirement,
    needs_autocast,
    needs_cuda,
    needs_package,
)
from composer_speedups.algorithms.technique import OnUnavailable, Stage, Technique
from composer_speedups.errors import CannotRunError, TechniqueError
from composer_speedups.state import device_of, is_compiled

__all__ = ["Float8Linear", "apply_float8_linear"]

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]
# torch._scaled_mm runs from Ada on; its row-wise kernel is written for Hopper.
_CAPABILITY = {"tensorwise": (8, 9), "rowwise": (9, 0), "rowwise_with_gw_hp": (9, 0)}
_MULTIPLE = 16  # of both dimensions of a weight


def apply_float8_linear(
    model: nn.Module,
    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise",
    min_features: int = 0,
    emulate: bool = False,
) -> list[str]:
    """Make the Linears of a model's blocks multiply in float8, forward and backward.

    Weights stay in their dtype; inputs, weights and gradients are scaled and cast for each matmul. Pooler and heads
    lie outside of the blocks and are left alone.

    Args:
        model: Changed in place; parameters, names and hooks stay. Train it under autocast.
        recipe: ``"tensorwise"`` (default) has one scale a tensor, ``"rowwise"`` one a row, and
            ``"rowwise_with_gw_hp"`` also leaves the weight's gradient in the autocast dtype.
        min_features: Leave out Linears with fewer inputs or outputs. Default 0; those whose inputs or outputs are
            no multiple of 16 are left out always.
        emulate: Round to float8 and multiply in float32, on any device: for tests, and to learn what float8 does
            to a model. Default False.

    Returns:
        Names of the modules changed; none when the model has the same float8 Linears already.

    Raises:
        ValueError: An unknown recipe, a device without float8 matmuls, or a model that has float8 Linears of other
            settings.

    Source: torchao.float8; Micikevicius et al., arXiv 2209.05433.
    """
    if recipe not in _CAPABILITY:
        raise ValueError(f"recipe must be one of {', '.join(_CAPABILITY)}, not {recipe!r}")
    if not emulate:
        _check_device(next(model.parameters()).device, recipe)
    modules, names = _modules(), []
    settings = {"recipe": recipe, "min_features": min_features, "emulate": emulate}
    converted = _converted(model)
    for module in converted.values():
        refuse_other_settings("float8 Linears", modules.settings_of(module), settings)
    if converted:
        return []
    config = dataclasses.replace(modules.float8_config(recipe), emulate=emulate)
    for name, module in _linears_of_blocks(model).items():
        weight = module.weight
        if min(weight.shape) >= min_features and all(size % _MULTIPLE == 0 for size in weight.shape):
            modules.to_float8(module, config, settings)
            names.append(name)
    return names


def _modules() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # an escape in one of torchao's doc strings, from Python 3.12 on
        from composer_speedups.algorithms.float8_linear import modules
    return modules


def _check_device(device: torch.device, recipe: str) -> None:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    if capability < _CAPABILITY[recipe]:
        wanted = ".".join(map(str, _CAPABILITY[recipe]))
        raise ValueError(
            f"{recipe} float8 needs a CUDA GPU of compute capability {wanted} or newer, and the model is on "
            f"{torch.cuda.get_device_name(device) if capability > (0, 0) else f'the {device.type}'}; set emulate=True "
            "to learn its rounding without its speed"
        )


def _linears_of_blocks(model: nn.Module) -> dict[str, nn.Linear]:
    """The plain Linears below a ModuleList: those of the encoder's blocks."""
    lists = [f"{name}." if name else "" for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and any(name.startswith(prefix) for prefix in lists)
    }


def _converted(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, _modules().RowPaddedFloat8Linear)}


def _undo(model: nn.Module) -> int:
    """Turn the float8 Linears back into plain ones; returns how many."""
    converted = _converted(model)
    for module in converted.values():
        _modules().to_plain(module)
    return len(converted)


class Float8Linear(Technique):
    """The encoder's matmuls in float8 (torchao), on Ada, Hopper and newer.

    Args:
        recipe: ``"tensorwise"`` (default), ``"rowwise"`` or ``"rowwise_with_gw_hp"``; see
            :func:`apply_float8_linear`.
        min_features: Leave out Linears with fewer inputs or outputs. Default 0.
        emulate: Round to float8 and multiply in float32, on any device: slower, for learning what float8 does to a
            model where there is no hardware for it. Default False.
        on_unavailable: See :class:`Technique`.

    Raises:
        ValueError: An unknown recipe.
        TechniqueError: At INIT, without torchao, bf16 mixed precision or such a GPU, or without a Linear that fits;
            in the first batch, when the kernel cannot run (with ``"warn"``, the Linears are plain again from then on).
    """

    name = "float8_linear"
    stage = Stage.SURGERY
    not_sharded = "its matmuls are tried on whole weights, which FSDP gathers block by block only"
    clashes: ClassVar[dict[str, str]] = {
        "kahan_optimizer": "kahan_optimizer trains without autocast, whose dtype float8_linear takes",
    }

    def __init__(
        self,
        recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise",
        min_features: int = 0,
        emulate: bool = False,
        *,
        on_unavailable: OnUnavailable = "stop",
    ) -> None:
        super().__init__(on_unavailable=on_unavailable)
        if recipe not in _CAPABILITY:
            raise ValueError(f"recipe must be one of {', '.join(_CAPABILITY)}, not {recipe!r}")
        self.recipe: Recipe = recipe
        self.min_features, self.emulate = min_features, emulate
        self._recorder: OperatorRecorder | None = None
        self._operators: dict[str, int] = {}
        self._seen_in = ""

    def requirements(self, context: Context) -> Iterable[Requirement]:
        yield needs_package("torchao", "composer_speedups[torchao]")
        if not self.emulate:
            yield needs_cuda(context, f"{self.recipe} float8", _CAPABILITY[self.recipe])
        yield needs_autocast(context, "float8_linear")

    def engage(self, state: State) -> dict[str, Any]:
        if state.precision == Precision.AMP_FP16:
            raise TechniqueError(
                self.name, "goes with bf16, and this run is fp16", "set the precision to bf16, or take it out"
            )
        try:
            apply_float8_linear(state.model, self.recipe, self.min_features, self.emulate)
        except ValueError as error:
            raise TechniqueError(self.name, str(error), "take it out for this model") from error
        modules = len(_converted(state.model))
        if modules == 0:
            raise TechniqueError(
                self.name,
                "no Linear in the model's blocks has inputs and outputs that are multiples of 16 "
                f"and at least min_features={self.min_features}",
                "take it out",
            )
        return {"modules": modules, "recipe": self.recipe, "emulated": self.emulate}

    def observe(self, event: Event, state: State) -> None:
        """See the float8 matmuls of the first forward pass; of compiled code, those of a probe of one module.

        The probe comes first in any case: it tells a kernel that cannot run here from any other failure.
        """
        if event == Event.BEFORE_FORWARD:
            if not self._operators:
                try:
                    self._note(self._probe(state), "probe")
                except CannotRunError as error:
                    self.unavailable(error)
                    self.evidence["linears_turned_back"] = _undo(state.model)
                    return
            if self._recorder is None and not is_compiled(state.model):
                self._recorder = _modules().Float8Recorder()
                self._recorder.__enter__()
        elif self._recorder is not None:
            recorder = self._recorder
            self.close()
            self._note(recorder, "forward pass")

    def _note(self, recorder: OperatorRecorder, seen_in: str) -> None:
        self._operators = {k: n for k, n in recorder.counts.items() if k in ("float8_mm", "_scaled_mm")}
        self._seen_in = seen_in

    def _probe(self, state: State) -> OperatorRecorder:
        """Forward and backward pass of one module on an odd number of rows."""
        module = next(iter(_converted(state.model).values()))
        recorder = _modules().Float8Recorder()
        sample = torch.ones(_MULTIPLE + 1, module.in_features, device=device_of(state), requires_grad=True)
        wanted = [sample, *(p for p in module.parameters() if p.requires_grad)]
        precision = get_precision_context(state.precision, state.precision_config)
        with (
            cannot_run(self.name, "a float8 matmul cannot run here", "try another recipe, or take it out"),
            precision,
            torch.enable_grad(),
            recorder,
        ):
            output = type(module).forward(module, sample)  # the module's own hooks are not called
            torch.autograd.grad(output.float().sum(), wanted)
        return recorder

    def close(self) -> None:
        if self._recorder is not None:  # also after a forward pass that raised
            self._recorder.__exit__(None, None, None)
            self._recorder = None

    def verify(self, state: State) -> dict[str, Any]:
        matmuls = self._operators.get("float8_mm", 0)
        kernels = self._operators.get("_scaled_mm", 0)
        fix = "leave the model's modules as they are after INIT, or take it out"
        if matmuls == 0:
            raise self.not_engaged(f"the {self._seen_in} had no matmul of float8 tensors", fix)
        if not self.emulate and kernels == 0:
            raise self.not_engaged(f"the {self._seen_in} ran no float8 kernel (_scaled_mm)", fix)
        return {"float8_matmuls": matmuls, "float8_kernels": kernels, "seen_in": self._seen_in}

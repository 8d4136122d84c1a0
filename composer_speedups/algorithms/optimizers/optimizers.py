"""The optimizer techniques: their settings, how they build the optimizer, and the proof of its first step."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from composer_speedups.core.errors import Refusal
from composer_speedups.core.requirements import needs_apex, needs_cuda, needs_package, needs_triton
from composer_speedups.core.technique import FSDP, NOT_YET, Effect, Order, Technique

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn
    from torch.optim import Optimizer

    from composer_speedups.algorithms.optimizers.swap import Defaults, Groups
    from composer_speedups.core.run import FirstBatch, Run

TECHNIQUES = (
    "adafactor apex_optimizer bnb_optimizer foreach_optimizer fused_optimizer kahan_optimizer lowbit_optimizer "
    "offloaded_optimizer sharded_optimizer"
).split()
_ONE_OPTIMIZER: Mapping[str, str] = dict.fromkeys(TECHNIQUES, "each sets the optimizer")


class OptimizerTechnique(Technique):
    """Replaces the run's AdamW at INIT, before Composer builds its schedulers, and checks its first step.

    A subclass declares its name, its settings and how it changes the result, and defines :meth:`build`.
    """

    order = Order.OPTIMIZER
    not_with: ClassVar[Mapping[str, str]] = {
        **_ONE_OPTIMIZER,
        FSDP: "the technique cannot replace the optimizer of sharded parameters",
    }
    state_key: ClassVar[str] = "exp_avg"  # a tensor that its state must have
    must_move: ClassVar[bool] = True  # whether a step at a learning rate of at least 1e-6 must change a parameter

    def reset(self) -> None:
        super().reset()
        self._old: Any = None
        self._new: Any = None

    def build(self, groups: Groups, defaults: Defaults, model: nn.Module) -> Optimizer:
        """The optimizer that replaces AdamW; see :func:`.swap.replaced`."""
        raise NotImplementedError

    def replace(self, old: Optimizer, model: nn.Module) -> Optimizer:
        """Return the optimizer that takes the place of ``old``, or raise ValueError."""
        from composer_speedups.algorithms.optimizers.swap import replaced

        return replaced(old, lambda groups, defaults: self.build(groups, defaults, model))

    def shown(self, seen: FirstBatch) -> Mapping[str, Any]:
        return {}

    def needs(self, run: Run) -> Iterable[Refusal]:
        if run.model is not None and len(run.optimizers) != 1:
            yield self.refusal(f"there are {len(run.optimizers)} optimizers", "pass one to the Trainer or to apply()")

    def engage(self, run: Run) -> dict[str, Any]:
        from composer_speedups.algorithms.optimizers.swap import class_name

        (self._old,) = run.optimizers
        try:
            self._new = self.replace(self._old, run.model)
        except ValueError as error:
            raise self.refusal(str(error), "use a new torch.optim.AdamW, or remove it") from error
        run.optimizers = [self._new]
        return {"optimizer": class_name(self._new), "in_place_of": class_name(self._old)}

    def before_load(self, run: Run) -> None:
        from composer_speedups.algorithms.optimizers.swap import attach_schedulers

        assert run.state is not None
        attach_schedulers(run.state.schedulers, self._old, self._new)

    fit_start = before_load  # fit() may be called with new schedulers

    def proof(self, run: Run, seen: FirstBatch) -> Mapping[str, Any]:
        from composer_speedups.core.optimizer_state import state_bytes, state_tensors

        if not seen.steps:
            raise self.no_effect("its optimizer took no step", "leave state.optimizers as it is after INIT")
        if seen.moved is None and not seen.ended:
            return NOT_YET  # the learning rate warms up from 0
        if seen.moved == 0 and self.must_move:
            raise self.no_effect("a step moved no parameter", "look at its gradients")
        dtypes: dict[str, set[str]] = {}
        for key, tensor in state_tensors(self._new):
            if tensor.numel() > 1:  # a step count is a scalar
                dtypes.setdefault(key, set()).add(str(tensor.dtype).removeprefix("torch."))
        if self.state_key and self.state_key not in dtypes:
            raise self.no_effect(f"the optimizer's state has no {self.state_key}", "leave its settings as they are")
        return {
            **({} if seen.moved is None else {"parameters_moved": f"{seen.moved} of {seen.trained}"}),
            "state_dtypes": {key: sorted(names) for key, names in sorted(dtypes.items())},
            "state_bytes": state_bytes(self._new),
            "state_on": sorted({tensor.device.type for _, tensor in state_tensors(self._new)}),
            **self.shown(seen),
        }


class _Implementation(OptimizerTechnique):
    """torch's own optimizer, which need not be AdamW, with another implementation of its step."""

    not_with = _ONE_OPTIMIZER
    state_key = ""  # SGD has no state, and its step may move no weight
    must_move = False
    flag: ClassVar[str]
    operators: ClassVar[str]  # the beginning of the names of its operators; gradient clipping runs others of foreach

    def replace(self, old: Optimizer, model: nn.Module) -> Optimizer:
        from composer_speedups.algorithms.optimizers.swap import set_implementation

        return set_implementation(old, self.flag)

    def after_load(self, run: Run) -> None:
        self.replace(self._new, run.model)

    def shown(self, seen: FirstBatch) -> Mapping[str, Any]:
        ran = {name: count for name, count in seen.operators.items() if name.startswith(self.operators)}
        if not ran:
            reason = f"the first step ran no {self.operators}* operator"
            raise self.no_effect(reason, "keep the optimizer's flags as they are")
        return {"operators_in_one_step": ran}


class ForEachOptimizer(_Implementation):
    """Makes the run's torch optimizer step with multi-tensor (horizontally batched) kernels."""

    name = "foreach_optimizer"
    effect = "rounding"
    flag = "foreach"
    operators = "_foreach_add"


class FusedOptimizer(_Implementation):
    """Makes the run's torch optimizer step with torch's fused kernel."""

    name = "fused_optimizer"
    effect = "rounding"
    flag = "fused"
    operators = "_fused_"


class ApexOptimizer(OptimizerTechnique):
    """Replaces the run's AdamW by Apex's FusedAdam, which updates many parameters in one kernel.

    Source: apex.optimizers.FusedAdam in its AdamW mode.
    """

    name = "apex_optimizer"
    effect = "rounding"

    def needs(self, run: Run) -> Iterable[Refusal]:
        yield from super().needs(run)
        yield from needs_apex(self.name, "apex.optimizers")
        yield from needs_cuda(self.name, run, "Apex's FusedAdam")

    def build(self, groups: Groups, defaults: Defaults, model: nn.Module) -> Optimizer:
        from apex.optimizers import FusedAdam

        class ApexFusedAdam(FusedAdam):  # type: ignore[misc]
            __qualname__ = "ApexFusedAdam"

            def zero_grad(self, set_to_none: bool = True) -> None:
                """Accept ``set_to_none``, which torch passes while a checkpoint is loaded and Apex does not support."""
                super().zero_grad()

        return ApexFusedAdam(groups, **defaults, adam_w_mode=True, bias_correction=True, set_grad_none=True)


class AdafactorOptimizer(OptimizerTechnique):
    """Replaces the run's AdamW by Adafactor, whose state is a small fraction of AdamW's.

    Learning rates and schedules are used. AdamW's ``betas`` and ``eps`` are not: Adafactor decays its moments by
    ``1 - step ** -0.8`` and clips updates at an RMS of 1. torch.optim.Adafactor always scales by the parameter's RMS,
    which is far below 1 for BERT's matrices.

    Source: Shazeer and Stern, arXiv 1804.04235, as implemented in transformers.
    """

    name = "adafactor"
    effect = "recipe"
    purpose = "saves memory"
    state_key = "exp_avg_sq_row"

    scale_parameter: bool = Field(False)
    """Multiply the learning rate by the RMS of each parameter."""

    def build(self, groups: Groups, defaults: Defaults, model: nn.Module) -> Optimizer:
        from transformers.optimization import Adafactor

        for settings in (*groups, defaults):
            del settings["betas"], settings["eps"]
        scaling = {"scale_parameter": self.scale_parameter, "relative_step": False, "warmup_init": False}
        return Adafactor(groups, **defaults, **scaling)


class KahanOptimizer(OptimizerTechnique):
    """Trains in pure bfloat16 (weights, gradients and AdamW's state), with Kahan-compensated updates.

    Weight, gradient, two moments and compensation take 2 bytes each per parameter, 10 compared with 16 in float32. The
    parameters remain the same objects with the same names. Buffers keep their dtype.

    Source: torch-optimi's AdamW; Kahan summation as in torchdistX's AnyPrecisionAdamW.
    """

    name = "kahan_optimizer"
    effect = "recipe"  # the weights themselves become bfloat16
    purpose = "saves memory"
    not_with: ClassVar = {
        **OptimizerTechnique.not_with,
        "mixed_precision": "kahan_optimizer converts the weights to bfloat16, so autocast would have no effect",
        "tf32_matmul": "kahan_optimizer converts the weights to bfloat16, so there are no float32 matmuls",
    }
    state_key = "kahan_comp"
    must_move = False  # updates below bfloat16's resolution move no weight and accumulate in the compensation

    def needs(self, run: Run) -> Iterable[Refusal]:
        yield from super().needs(run)
        yield from needs_package(self.name, "optimi", ".[optimi]")
        if run.device.type == "cuda":
            yield from needs_cuda(self.name, run, "bfloat16", (8, 0))
        if run.autocast:
            reason = f"its weights are bfloat16, and this run has autocast ({run.precision})"
            yield self.refusal(reason, "set the Trainer's precision to fp32 and remove mixed_precision")

    def build(self, groups: Groups, defaults: Defaults, model: nn.Module) -> Optimizer:
        import torch
        from optimi import AdamW

        from composer_speedups.core.trainer_state import is_composer_model

        class KahanAdamW(AdamW):  # checkpoints store the state by class name, which must differ from torch's AdamW
            __qualname__ = "KahanAdamW"

        if any(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in model.modules()):
            raise ValueError("BatchNorm keeps its statistics in float32")
        for name, parameter in model.named_parameters():  # such as the integers of a quantised base
            if parameter.dtype not in (torch.float32, torch.bfloat16):
                raise ValueError(f"{name} is {parameter.dtype}, and only float32 weights become bfloat16")
        for parameter in model.parameters():
            if parameter.dtype != torch.bfloat16:
                parameter.grad = None  # its dtype would not match
                parameter.data = parameter.data.to(torch.bfloat16)
        for module in [*model.children()] if is_composer_model(model) else [model]:
            module.register_forward_pre_hook(_to_bfloat16, with_kwargs=True)
        for group in groups:
            group["beta1"], group["beta2"] = group.pop("betas")
        return KahanAdamW(groups, **defaults, kahan_sum=True)


def _to_bfloat16(_module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Cast floating-point inputs, such as images and embeddings, to bfloat16; token ids are not changed."""
    import torch
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, lambda x: x.bfloat16() if x.is_floating_point() else x, (args, kwargs))


class OffloadedOptimizer(OptimizerTechnique):
    """Moves AdamW's state (8 bytes per parameter) and its step to the CPU."""

    name = "offloaded_optimizer"
    effect = "rounding"
    computes_on_host = True
    purpose = "saves memory"

    allow_cpu: bool = Field(False)
    """Engage in runs on a CPU, too, where it saves nothing; otherwise it is refused."""

    def needs(self, run: Run) -> Iterable[Refusal]:
        yield from super().needs(run)
        if not self.allow_cpu:
            yield from needs_cuda(self.name, run, "offloading the optimizer")

    def build(self, groups: Groups, defaults: Defaults, model: nn.Module) -> Optimizer:
        from composer_speedups.algorithms.optimizers.adamw import HostAdamW

        return HostAdamW(groups, defaults)


class ShardedOptimizer(OptimizerTechnique):
    """Splits AdamW's state (8 bytes per parameter) over the ranks of DDP, which is ZeRO stage 1.

    With one rank it engages with a plain AdamW, so that a run can be resumed on one.
    """

    name = "sharded_optimizer"
    effect = "rounding"
    not_with: ClassVar = {**_ONE_OPTIMIZER, FSDP: "FSDP already shards the optimizer's state"}
    purpose = "saves memory"
    state_key = ""  # a rank's share may be a frozen embedding alone; all ranks are asked together, below

    def build(self, groups: Groups, defaults: Defaults, model: nn.Module) -> Optimizer:
        from torch.optim import AdamW

        from composer_speedups.algorithms.optimizers.adamw import ShardedAdamW
        from composer_speedups.core.trainer_state import world_size

        if world_size() > 1:
            return ShardedAdamW(groups, defaults)
        on_gpu = all(p.is_cuda for group in groups for p in group["params"])
        return AdamW(groups, **defaults, fused=on_gpu or None)

    def shown(self, seen: FirstBatch) -> Mapping[str, Any]:
        from torch import distributed

        from composer_speedups.core.optimizer_state import state_bytes
        from composer_speedups.core.trainer_state import world_size

        sizes = [state_bytes(self._new)] * world_size()
        if len(sizes) > 1:
            distributed.all_gather_object(sizes, sizes[0])
        if not any(sizes):
            raise self.no_effect("no rank has any state", "look at the parameters' gradients")
        return {"ranks": len(sizes), "state_bytes_by_rank": sizes}


class _Quantised(OptimizerTechnique):
    """AdamW whose moments have few bits; those of embeddings and small parameters keep their precision."""

    purpose = "saves memory"
    size_setting: ClassVar[str]
    bits: Any

    def shown(self, seen: FirstBatch) -> Mapping[str, Any]:
        from composer_speedups.algorithms.optimizers.adamw import tensors_by_state_bits

        counts, bits = tensors_by_state_bits(self._new), str(self.bits).replace("fp8", "8")
        if bits not in counts:
            fix = f"lower {self.size_setting}, or remove it: the model is too small for it"
            raise self.no_effect(f"no parameter has {bits}-bit state", fix)
        return {"tensors_by_state_bits": counts}


class BnbOptimizer(_Quantised):
    """Uses bitsandbytes' AdamW with 8-bit or 32-bit state; embeddings keep 32-bit state.

    Source: Dettmers et al., arXiv 2110.02861.
    """

    name = "bnb_optimizer"
    effect = "recipe"
    state_key = "state1"
    size_setting = "min_8bit_size"

    bits: Literal[8, 32] = Field(8)
    """Bits per value of each moment; 32 is AdamW up to rounding."""
    paged: bool = Field(False)
    """Keep the state in paged memory; needs a GPU."""
    stable_embedding: bool = Field(False)
    """Convert the word embedding to bitsandbytes' StableEmbedding, which normalises its rows."""
    min_8bit_size: int = Field(4096, ge=0)
    """Minimum number of values of a parameter with 8-bit state."""

    @classmethod
    def effect_with(cls, settings: Mapping[str, Any], device: str | None) -> Effect:
        return "rounding" if settings.get("bits") == 32 and not settings.get("stable_embedding") else "recipe"

    def needs(self, run: Run) -> Iterable[Refusal]:
        yield from super().needs(run)
        for name in ("lora", "layer_freezing") if self.stable_embedding else ():
            if name in run.techniques:
                reason = f"conflicts with {name}, which freezes the word embedding: a stable embedding must be trained"
                yield self.refusal(reason, "set stable_embedding: false, or remove one of them")
        yield from needs_package(self.name, "bitsandbytes", ".[bnb]")
        if self.paged:
            yield from needs_cuda(self.name, run, "paged optimizer state")

    def build(self, groups: Groups, defaults: Defaults, model: nn.Module) -> Optimizer:
        from composer_speedups.algorithms.optimizers.adamw import bnb_adamw, embedding_weights

        settings = {"optim_bits": self.bits, "min_8bit_size": self.min_8bit_size, "is_paged": self.paged}
        if self.stable_embedding:
            from composer_speedups.algorithms.optimizers.stable_embedding import make_stable_embedding

            added = make_stable_embedding(model)
            # not a new group: schedulers have a fixed number of groups
            of_norms = next((g for g in groups if any(p.ndim == 1 for p in g["params"])), groups[0])
            of_norms["params"] += added
        return bnb_adamw(groups, embedding_weights(model), **defaults, **settings)

    def after_load(self, run: Run) -> None:
        """Move a loaded state back to paged memory."""
        import torch

        for parameter, state in self._new.state.items() if self.paged else ():
            for key in {"state1", "state2"} & state.keys():
                loaded, state[key] = state[key], self._new.get_state_buffer(parameter, dtype=state[key].dtype)
                torch.cuda.synchronize(parameter.device)  # the GPU zeroes it before the host writes to it
                state[key].copy_(loaded)

    def proof(self, run: Run, seen: FirstBatch) -> Mapping[str, Any]:
        shown = super().proof(run, seen)
        if shown is NOT_YET or not self.stable_embedding:
            return shown
        from composer_speedups.algorithms.optimizers.stable_embedding import stable_embeddings

        norms = {name: module.norm.weight for name, module in stable_embeddings(run.model).items()}
        trained = [name for name, weight in norms.items() if self._new.state.get(weight)]
        if not trained:
            raise self.no_effect("no stable embedding was trained", "set stable_embedding=False")
        return {**shown, "stable_embedding": trained}

    def export(self, run: Run, weights: dict[str, Any], folder: Path) -> dict[str, Any]:
        if not self.stable_embedding:
            return weights
        from composer_speedups.algorithms.optimizers.stable_embedding import folded_weights

        return folded_weights(run.model.model, weights)

    def shown(self, seen: FirstBatch) -> Mapping[str, Any]:
        if not self.paged:
            return super().shown(seen)
        paged = sum(getattr(value, "is_paged", False) for s in self._new.state.values() for value in s.values())
        if not paged:
            raise self.no_effect("no state tensor is paged", "set paged=False: no tensor has 100,000 values")
        return {**super().shown(seen), "paged_tensors": paged}


class LowBitOptimizer(_Quantised):
    """Uses torchao's AdamW with 8-bit, 4-bit or fp8 state; embeddings keep float32 state.

    Source: torchao.optim; arXiv 2110.02861 (8 bits), arXiv 2309.01507 (4 bits).
    """

    name = "lowbit_optimizer"
    effect = "recipe"
    size_setting = "min_size"

    bits: Literal[8, 4, "fp8"] = Field(8)
    """Bits per value of each moment; fp8 is e4m3."""
    min_size: int = Field(4096, ge=0)
    """Minimum number of values of a parameter with low-bit state."""

    def needs(self, run: Run) -> Iterable[Refusal]:
        yield from super().needs(run)
        missing = [*needs_package(self.name, "torchao", ".[torchao]")]
        yield from missing
        if not missing:  # importing it allows torch to load its state, before train.py reads a checkpoint
            importlib.import_module("torchao.optim")
        if run.device.type == "cuda":
            yield from needs_triton(self.name)
            if self.bits == "fp8":
                yield from needs_cuda(self.name, run, "compiled fp8 state", (8, 9))

    def build(self, groups: Groups, defaults: Defaults, model: nn.Module) -> Optimizer:
        from composer_speedups.algorithms.optimizers.adamw import embedding_weights, torchao_adamw

        return torchao_adamw(groups, embedding_weights(model), self.bits, self.min_size, **defaults)

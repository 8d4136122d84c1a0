"""The table of kinds: how each optimizer is built, what it needs, and what its state must show after the first step."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import AdamW, Optimizer
from torch.utils._pytree import tree_map

from composer_speedups.algorithms.optimizers.host_adamw import HostAdamW
from composer_speedups.algorithms.optimizers.proof import embedding_weights, state_bits
from composer_speedups.algorithms.optimizers.sharded_adamw import ShardedAdamW
from composer_speedups.algorithms.optimizers.stable_embedding import (
    folded_weights,
    make_stable_embedding,
    stable_embeddings,
)
from composer_speedups.algorithms.optimizers.swap import (
    Defaults,
    Factory,
    Groups,
    UnfitOptimizerError,
    check_label,
    replaced,
    set_implementation,
)
from composer_speedups.algorithms.optimizers.torchao_adamw import lowbit_adamw
from composer_speedups.core.errors import Refusal, first_line
from composer_speedups.core.optimizer_state import state_bytes, state_tensors
from composer_speedups.core.requirements import needs_cuda, needs_package, needs_triton
from composer_speedups.core.run import Run
from composer_speedups.core.trainer_state import is_composer_model, world_size

Evidence = dict[str, Any]
Needs = Iterable[Refusal]

_ADAMW_BYTES = 8  # two float32 moments per parameter
_ROUNDS_AWAY = 2**-9  # for any smaller x, a bfloat16 number times (1 - x) rounds to the same number
_MIN_PAGED = 100_000  # number of values; bitsandbytes keeps smaller tensors in GPU memory


@dataclass(frozen=True)
class Kind:
    """One kind of optimizer with its settings.

    Attributes:
        label: Its name, with every setting that its state depends on.
        factory: Builds the optimizer that replaces AdamW; see :func:`.swap.replaced`.
        flag: Without a factory: the flag of torch's optimizer. Its operators must run in the first step.
        needs: What can be checked before a model exists.
        check: Evidence from the optimizer and the model after a step. Raises UnfitOptimizerError if they show that the
            kind had no effect.
        must_move: Whether a step at a learning rate of at least 1e-6 must change a parameter.
        stock_state: Its state is a plain AdamW's.
        page_again: Moves a loaded state to paged memory.
        exported: Converts the state dict of the trained model to that of the stock model.
    """

    label: str
    factory: Factory | None = None
    flag: str = ""
    needs: Callable[[Run], Needs] = lambda run: ()
    check: Callable[[Optimizer, nn.Module], Evidence] = lambda optimizer, model: {}
    must_move: bool = True
    stock_state: bool = False
    page_again: Callable[[Any], None] = lambda optimizer: None
    exported: Callable[[nn.Module, dict[str, Any]], dict[str, Any]] = lambda model, weights: weights

    def build(self, old: Optimizer, model: nn.Module) -> Optimizer:
        """Change the run's optimizer, or return one that takes its place. Raises UnfitOptimizerError, in which case
        nothing was changed."""
        if self.factory is None:
            return set_implementation(old, self.flag)
        return replaced(old, self.label, self.factory, model, stock_state=self.stock_state)

    def loaded(self, optimizer: Optimizer) -> None:
        """Call it after a checkpoint was loaded."""
        if self.factory is None:
            set_implementation(optimizer, self.flag)
        elif not self.stock_state:
            check_label(optimizer, self.label)
        self.page_again(optimizer)


def _flag(flag: str) -> Kind:
    """torch's own optimizer with another implementation, which need not be AdamW: SGD's step may move no weight."""
    return Kind(f"torch's {flag} implementation", flag=flag, must_move=False)


def _apex() -> Kind:
    """Apex's FusedAdam in its AdamW mode. Source: apex.optimizers.FusedAdam."""
    install = (
        "build it from github.com/NVIDIA/apex with --cpp_ext --cuda_ext, "
        "or use fused_optimizer, which has the same effect with torch's kernel"
    )

    def needs(run: Run) -> Needs:
        missing = "NVIDIA Apex is not installed (the package index has no build of it)"
        if not apex_installed():
            yield Refusal("apex_optimizer", missing, install)
        yield from needs_cuda("apex_optimizer", run, "Apex's FusedAdam")

    def factory(groups: Groups, defaults: Defaults, model: nn.Module) -> Optimizer:
        from apex.optimizers import FusedAdam

        class ApexFusedAdam(FusedAdam):  # type: ignore[misc]
            __qualname__ = "ApexFusedAdam"

            def zero_grad(self, set_to_none: bool = True) -> None:
                """Accept ``set_to_none``, which torch passes while a checkpoint is loaded and Apex does not support."""
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = None

        try:
            return ApexFusedAdam(groups, **defaults, adam_w_mode=True, bias_correction=True, set_grad_none=True)
        except RuntimeError as error:  # Apex was built without its kernels
            raise UnfitOptimizerError(f"FusedAdam cannot be built ({first_line(error)})", install) from error

    def check(optimizer: Optimizer, model: nn.Module) -> Evidence:
        counted = [float(group["step"]) for group in optimizer.param_groups if group.get("step")]
        if not counted:
            raise UnfitOptimizerError("FusedAdam counted no step", "do not change state.optimizers after INIT")
        return {"apex_steps": int(max(counted))}

    return Kind("Apex FusedAdam", factory, needs=needs, check=check)


def apex_installed() -> bool:
    """Return whether ``apex`` is NVIDIA's; the package index has another package with that name."""
    try:
        return importlib.util.find_spec("apex.optimizers") is not None
    except ImportError:
        return False


def _bnb(bits: Literal[8, 32], paged: bool, stable_embedding: bool, min_8bit_size: int) -> Kind:
    """bitsandbytes' AdamW. Source: Dettmers et al., arXiv 2110.02861."""
    label = f"bitsandbytes AdamW({bits=}, {min_8bit_size=}, {stable_embedding=})"

    def needs(run: Run) -> Needs:
        yield from needs_package("bnb_optimizer", "bitsandbytes", ".[bnb]")
        if paged:
            yield from needs_cuda("bnb_optimizer", run, "paged optimizer state")

    def factory(groups: Groups, defaults: Defaults, model: nn.Module) -> Optimizer:
        from bitsandbytes.functional import GlobalPageManager
        from bitsandbytes.optim import AdamW, GlobalOptimManager

        norms = {p for m in model.modules() if isinstance(m, nn.LayerNorm) for p in m.parameters()}
        added = make_stable_embedding(model) if stable_embedding else []
        # bitsandbytes has process-wide managers. One keeps overrides by id(), which would outlive the run and apply to
        # any later parameter with the same id. The other keeps paged tensors alive. This optimizer has its own.
        manager = GlobalOptimManager.__new__(GlobalOptimManager)
        manager.initialize()
        manager.override_config(embedding_weights(model), "optim_bits", 32)
        pages = GlobalPageManager.__new__(GlobalPageManager)
        pages.initialize()
        new: Any = AdamW(groups, **defaults, optim_bits=bits, min_8bit_size=min_8bit_size, is_paged=paged)
        new.mng, new.page_mng = manager, pages
        similar = norms or {*embedding_weights(model)}
        # Not in a new group, because schedulers have a fixed number of groups.
        group = next((g for g in new.param_groups if not similar.isdisjoint(g["params"])), new.param_groups[0])
        group["params"].extend(added)
        return new  # type: ignore[no-any-return]

    def moments(optimizer: Optimizer) -> list[tuple[Tensor, dict[str, Any], str]]:
        """Each state tensor's parameter, and where the tensor is stored."""
        return [(p, s, key) for p, s in optimizer.state.items() for key in ("state1", "state2") if key in s]

    def page_again(optimizer: Any) -> None:
        for parameter, state, key in moments(optimizer) if paged else ():
            loaded = state[key]
            if loaded.numel() >= _MIN_PAGED and not getattr(loaded, "is_paged", False):
                state[key] = optimizer.get_state_buffer(parameter, dtype=loaded.dtype)
                torch.cuda.synchronize(parameter.device)  # the GPU zeroes it before the host writes to it
                state[key].copy_(loaded)

    def check(optimizer: Optimizer, model: nn.Module) -> Evidence:
        evidence = state_bits(optimizer, model, bits, f"min_8bit_size ({min_8bit_size} now)")
        if paged:
            count = sum(getattr(state[key], "is_paged", False) for _, state, key in moments(optimizer))
            if not count:
                raise UnfitOptimizerError("no state tensor is paged", "set paged=False: no tensor has 100,000 values")
            evidence["paged_tensors"] = count
        if stable_embedding:
            norms = {name: embedding.norm.weight for name, embedding in stable_embeddings(model).items()}
            evidence["stable_embedding"] = [name for name, weight in norms.items() if optimizer.state.get(weight)]
            if not evidence["stable_embedding"]:
                raise UnfitOptimizerError("no stable embedding was trained", "set stable_embedding=False")
        return evidence

    others: dict[str, Any] = {"exported": folded_weights} if stable_embedding else {}
    return Kind(label, factory, needs=needs, check=check, page_again=page_again, **others)


def _adafactor(scale_parameter: bool) -> Kind:
    """transformers' Adafactor without its relative step size, so that learning rates and schedules are used.

    AdamW's ``betas`` and ``eps`` are not used: Adafactor decays its moments by ``1 - step ** -0.8`` and clips updates
    at an RMS of 1. torch.optim.Adafactor always scales by the RMS, which is far below 1 for BERT's matrices.

    Source: Shazeer and Stern, "Adafactor" (arXiv 1804.04235).
    """

    def factory(groups: Groups, defaults: Defaults, model: nn.Module) -> Optimizer:
        from transformers.optimization import Adafactor

        if not any(p.ndim > 1 for group in groups for p in group["params"]):
            raise UnfitOptimizerError("the optimizer has no matrix whose second moments could be factored", "use AdamW")
        for settings in (*groups, defaults):
            del settings["betas"], settings["eps"]
        return Adafactor(groups, **defaults, scale_parameter=scale_parameter, relative_step=False, warmup_init=False)

    def check(optimizer: Optimizer, model: nn.Module) -> Evidence:
        matrices = {p: s for p, s in optimizer.state.items() if p.ndim > 1 and s}
        factored = sum("exp_avg_sq_row" in state for state in matrices.values())
        if not factored:
            raise UnfitOptimizerError("no matrix has factored second moments", "look for code that changes its state")
        stepped = sum(p.numel() for p, state in optimizer.state.items() if state)
        return {"factored": f"{factored} of {len(matrices)}", "adamw_state_bytes": _ADAMW_BYTES * stepped}

    return Kind(f"Adafactor({scale_parameter=})", factory, check=check)


def _kahan() -> Kind:
    """bfloat16 weights, and torch-optimi's AdamW with Kahan summation.

    Weight, gradient, two moments and compensation take 2 bytes each per parameter, 10 compared with 16 in float32. The
    parameters remain the same objects with the same names. Buffers keep their dtype.

    Source: torch-optimi's AdamW; Kahan summation as in torchdistX's AnyPrecisionAdamW.
    """

    def needs(run: Run) -> Needs:
        yield from needs_package("kahan_optimizer", "optimi", ".[optimi]")
        if run.device.type == "cuda":
            yield from needs_cuda("kahan_optimizer", run, "bfloat16", (8, 0))
        if run.autocast:
            reason = f"its weights are bfloat16, and this run has autocast ({run.precision})"
            fix = "set the Trainer's precision to fp32 and remove mixed_precision"
            yield Refusal("kahan_optimizer", reason, fix)

    def factory(groups: Groups, defaults: Defaults, model: nn.Module) -> Optimizer:
        from optimi import AdamW

        class KahanAdamW(AdamW):  # checkpoints store the state by class name, which must differ from torch's AdamW
            __qualname__ = "KahanAdamW"

        parameters = [*model.parameters(), *(p for group in groups for p in group["params"])]
        if unfit := [p.dtype for p in parameters if p.dtype not in (torch.float32, torch.bfloat16)]:
            raise UnfitOptimizerError(f"the model has {unfit[0]} parameters", "load it in float32 or bfloat16")
        if any(isinstance(m, _NormBase) and m.running_mean is not None for m in model.modules()):
            raise UnfitOptimizerError("BatchNorm keeps its statistics in float32", "use a model without BatchNorm")
        for parameter in parameters:
            if parameter.dtype != torch.bfloat16:
                parameter.grad = None  # its dtype would not match
                parameter.data = parameter.data.to(torch.bfloat16)
        for module in [*model.children()] if is_composer_model(model) else [model]:
            if _to_bfloat16 not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_to_bfloat16, with_kwargs=True)
        for group in groups:
            group["beta1"], group["beta2"] = group.pop("betas")
        return KahanAdamW(groups, **defaults, kahan_sum=True)

    def check(optimizer: Optimizer, model: nn.Module) -> Evidence:
        dtypes = {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
        if dtypes != {"bfloat16"}:
            raise UnfitOptimizerError(f"the weights are {', '.join(sorted(dtypes))}", "do not change their dtype")
        kept = [c for state in optimizer.state.values() if (c := state.get("kahan_comp")) is not None]
        if not kept:
            raise UnfitOptimizerError(
                "no step kept a compensation", "look for code that changes the optimizer's groups"
            )
        decays = [float(group["lr"]) * group["weight_decay"] for group in optimizer.param_groups]
        decay = "none" if not any(decays) else "applied" if max(decays) >= _ROUNDS_AWAY else "rounds away"
        return {"weights": "bfloat16", "compensated": sum(int(c.count_nonzero()) for c in kept), "weight_decay": decay}

    # Updates below bfloat16's resolution move no weight and accumulate in the compensation.
    return Kind("AdamW(kahan_sum=True)", factory, needs=needs, check=check, must_move=False)


def _to_bfloat16(_module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Cast floating-point inputs, such as images and embeddings, to bfloat16; token ids are not changed."""
    return tree_map(
        lambda x: x.to(torch.bfloat16) if isinstance(x, Tensor) and x.is_floating_point() else x, (args, kwargs)
    )


def _lowbit(bits: Literal[8, 4, "fp8"], min_size: int) -> Kind:
    """torchao's AdamW. Source: torchao.optim; arXiv 2110.02861 (8 bits), arXiv 2309.01507 (4 bits)."""

    def needs(run: Run) -> Needs:
        yield from needs_package("lowbit_optimizer", "torchao", ".[torchao]")
        if run.device.type == "cuda":
            yield from needs_triton("lowbit_optimizer")
            if bits == "fp8":
                yield from needs_cuda("lowbit_optimizer", run, "compiled fp8 state", (8, 9))

    def factory(groups: Groups, defaults: Defaults, model: nn.Module) -> Optimizer:
        return lowbit_adamw(groups, defaults, bits, full_precision=embedding_weights(model), min_size=min_size)

    def check(optimizer: Optimizer, model: nn.Module) -> Evidence:
        return state_bits(optimizer, model, 8 if bits == "fp8" else bits, f"min_size ({min_size} now)")

    return Kind(f"torchao AdamW({bits=}, {min_size=})", factory, needs=needs, check=check)


def _offloaded(allow_cpu: bool) -> Kind:
    def check(optimizer: Optimizer, model: nn.Module) -> Evidence:
        if elsewhere := {tensor.device.type for _, tensor in state_tensors(optimizer)} - {"cpu"}:
            raise UnfitOptimizerError(f"its state is on {', '.join(sorted(elsewhere))}", "do not move the state")
        devices = {p.device.type for group in optimizer.param_groups for p in group["params"]}
        return {"state_on": "cpu", "weights_on": sorted(devices)}

    return Kind(
        "AdamW on the CPU",
        lambda groups, defaults, model: HostAdamW(groups, defaults),
        needs=lambda run: () if allow_cpu else needs_cuda("offloaded_optimizer", run, "offloading the optimizer"),
        check=check,
    )


def _sharded() -> Kind:
    """torch's ZeroRedundancyOptimizer around AdamW, fused on a GPU; a plain AdamW with one rank."""

    def factory(groups: Groups, defaults: Defaults, model: nn.Module) -> Optimizer:
        parameters = [p for group in groups for p in group["params"]]
        dtypes = sorted({str(p.dtype) for p in parameters})
        if len(dtypes) > 1:
            reason = f"the optimizer has parameters of {' and '.join(dtypes)}"
            raise UnfitOptimizerError(reason, "train parameters of one dtype")
        ranks = world_size()
        if ranks == 1:
            return AdamW(groups, **defaults, fused=all(p.is_cuda for p in parameters) or None)
        if len(parameters) < ranks:
            reason = f"{len(parameters)} parameters cannot be divided among {ranks} ranks"
            raise UnfitOptimizerError(reason, "use torch.optim.AdamW")
        return ShardedAdamW(groups, defaults)

    def check(optimizer: Optimizer, model: nn.Module) -> Evidence:
        counts = [(sum(map(bool, optimizer.state.values())), state_bytes(optimizer))]
        if world_size() > 1:
            counts *= world_size()
            torch.distributed.all_gather_object(counts, counts[0])
        on_all, stepped = sum(count for count, _ in counts), len(optimizer.state)
        if on_all != stepped:
            reason = f"the ranks hold {on_all} states of {stepped} parameters"
            raise UnfitOptimizerError(reason, "step with the optimizer of state.optimizers")
        sizes = [size for _, size in counts]
        evidence = {"ranks": len(sizes), "state_bytes_by_rank": sizes, "state_bytes_of_all": sum(sizes)}
        note = {"note": "the state is not split, because there is one rank"} if len(sizes) == 1 else {}
        return evidence | note

    return Kind("AdamW split over the ranks", factory, stock_state=True, check=check)


KINDS: dict[str, Callable[..., Kind]] = {
    "foreach_optimizer": partial(_flag, "foreach"),
    "fused_optimizer": partial(_flag, "fused"),
    "apex_optimizer": _apex,
    "bnb_optimizer": _bnb,
    "adafactor": _adafactor,
    "kahan_optimizer": _kahan,
    "lowbit_optimizer": _lowbit,
    "offloaded_optimizer": _offloaded,
    "sharded_optimizer": _sharded,
}
"""YAML name → a function of the technique's settings."""

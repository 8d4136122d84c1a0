"""LoRA adapters in fused layers on a GPU: accuracy in 16 and 8 bits compared with PEFT, CUDA graphs, resuming."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from composer_speedups import (
    CUDAGraphs,
    EarlyLoss,
    FusedLayers,
    FusedOptimizer,
    LoRA,
    MixedPrecision,
    Unpadding,
    apply_recommended,
)
from composer_speedups.algorithms.cuda_graphs.graphed_calls import install
from composer_speedups.algorithms.fused_layers.fusing import fuse
from composer_speedups.algorithms.unpadding.encoder_swap import unpad
from composer_speedups.kernels.host import counting
from tests.helpers.common import (
    SAVING,
    Recorder,
    batch,
    final_weights,
    learnable_batches,
    plain_batches,
    tiny_bert,
    trained,
)
from tests.helpers.masks import masked_batch, random_masks
from tests.helpers.models import FUSED, HEADS, tiny_model
from tests.helpers.unpadded import observed
from tests.helpers.waiting import check_planned_steps
from tests.reference.loop import losses_on_a_gpu, on_gpu
from tests.reference.nearness import distance, values

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")]

needs_float8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9),
    reason="8-bit matmuls need compute capability 8.9",
)
PRECISIONS = ["bf16", pytest.param("fp8", marks=needs_float8)]
WITH_ADAPTERS = [family for family in FUSED if family not in ("modernbert", "esm")]


def adapted(model: Any, **settings: Any) -> Any:
    """Return a model of the user's own with adapters of some size, as after training."""
    torch.manual_seed(3)
    defaults: dict[str, Any] = {"target_modules": "all-linear", "r": 4, "lora_alpha": 12, "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(**{**defaults, **settings})).cuda()


def fused(model: Any, last_layer: Any = "needed", precision: Any = "bf16") -> Any:
    unpad(model, 8)
    fuse(model, last_layer, precision)
    return model


def errors(
    stock: Any, ours: Any, head: Any, dtype: torch.dtype, name: str = "fused_layer"
) -> list[tuple[float, float]]:
    """Return, for logits and gradients, the error of ours and of the padded model in ``dtype`` against float32."""
    exact, theirs, mine = [], [], []
    for number, mask in enumerate(random_masks(25, widest=64), 200):
        inputs = on_gpu(masked_batch(mask, head, seed=number))
        exact.append(values(stock, inputs, None))
        theirs.append(values(stock, inputs, dtype))
        mine.append(values(ours, inputs, dtype))
    assert observed(lambda: values(ours, inputs, dtype))[name], "the kernels run"
    found = []
    for i in range(2):
        reference = torch.cat([step[i] for step in exact])
        found.append(tuple(distance(torch.cat([step[i] for step in kind]), reference) for kind in (mine, theirs)))
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(("dtype", "bias"), [(torch.bfloat16, "none"), (torch.float16, "lora_only")])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("family", WITH_ADAPTERS)
def test_errors_are_at_most_three_times_pefts(family: Any, head: Any, dtype: torch.dtype, bias: str) -> None:
    stock = adapted(tiny_model(family, head), bias=bias)  # without bias, GELU's kernels compute products of adapters
    ours = fused(copy.deepcopy(stock))
    for what, (mine, theirs) in zip(("logits", "gradients"), errors(stock, ours, head, dtype), strict=True):
        assert 0 < mine <= 3 * theirs, what


@needs_float8
@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_errors_in_eight_bits_are_within_the_bounds_of_full_fine_tuning(family: Any) -> None:
    stock = adapted(tiny_model(family))
    ours = fused(copy.deepcopy(stock), "all", "fp8")
    found = errors(stock, ours, "classification", torch.bfloat16, "fused_layer_fp8")
    for bound, (mine, _) in zip((0.25, 0.5), found, strict=True):
        assert 0.005 < mine < bound


@pytest.mark.parametrize("precision", PRECISIONS)
def test_dropout_of_adapters_repeats_with_the_seed_and_stops_in_eval_mode(precision: Any) -> None:
    model = fused(adapted(tiny_bert(), lora_dropout=0.3).train(), "all", precision)
    inputs = on_gpu(batch([12, 7, 16, 10]))
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        with torch.autocast("cuda", torch.bfloat16):
            results.append([model(**inputs).logits for _ in range(2)])
    if precision == "bf16":  # with fp8, the second pass has fitted scales
        assert torch.equal(results[0][0], results[1][0])
    assert not torch.allclose(results[1][0], results[1][1], atol=1e-2)
    model.eval()
    with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
        assert torch.equal(model(**inputs).logits, model(**inputs).logits)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_losses_are_the_same_with_and_without_graphs(precision: Any) -> None:
    losses, weights = [], []
    for with_graphs in (False, True):
        model = fused(adapted(tiny_bert()).train(), "needed", precision)
        if with_graphs:
            install(model, 4)
        losses.append(losses_on_a_gpu(model, [batch([12, 7, 16, 10], seed=i) for i in range(5)]))
        weights.append([p.detach().clone() for p in model.parameters() if p.requires_grad])
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    # warming up for a capture moves the scales of 8-bit operands by up to a factor of two, and so what is rounded
    bound = 2e-2 if precision == "bf16" else 8e-2
    assert losses[1] == pytest.approx(losses[0], rel=bound)
    for one, other in zip(*weights, strict=True):
        assert distance(other, one) < bound


def test_a_counted_step_never_synchronizes_with_the_gpu() -> None:
    check_planned_steps(fused(adapted(tiny_bert(dropout=0.1), lora_dropout=0.1).train()))


def test_a_peft_model_of_ones_own_runs_the_kernels() -> None:
    model = adapted(tiny_bert())
    apply_recommended(model.cuda(), check="never")
    with torch.autocast("cuda", torch.bfloat16), counting() as ran:
        model(**on_gpu(batch([12, 7, 16, 10]))).loss.backward()
    assert (ran["fused_layer"], ran["first_tokens"], ran["fused_embeddings"]) == (1, 1, 1)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("order", [1, -1], ids=["as written", "reversed"])
def test_it_trains_in_the_fast_set(precision: Any, order: int) -> None:
    lora, layers, graphs = LoRA(alpha=64.0, dropout=0.1), FusedLayers("all", precision), CUDAGraphs()
    others: list[Any] = [Unpadding(8), MixedPrecision("bf16"), EarlyLoss(), FusedOptimizer()]
    algorithms = [lora, layers, graphs, *others][::order]
    trainer = trained(algorithms, model=tiny_bert(dropout=0.1), batches=plain_batches(6), gpu=True)
    way = "by fused kernels" if precision == "bf16" else "by fused kernels in 8 bits"
    assert layers.evidence["layers_ran"] == f"2 {way}"
    assert lora.evidence["base_unchanged"]
    assert graphs.evidence["replays"] >= 4
    assert all(weight.isfinite().all() for weight in final_weights(trainer).values())


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_loss_curve_matches_pefts(precision: Any) -> None:
    curves = []
    for kernels in (False, True):
        recorder = Recorder()
        fast: list[Any] = [Unpadding(8), FusedLayers("all", precision), CUDAGraphs()] if kernels else []
        algorithms = [LoRA(alpha=64.0), MixedPrecision("bf16"), *fast]
        trained(algorithms, batches=learnable_batches(), callbacks=[recorder], gpu=True)
        curves.append(torch.tensor(recorder.losses).unfold(0, 20, 1).mean(-1))
    assert curves[0][-1] < 0.8 * curves[0][0], "the comparison needs a loss that falls"
    assert float((curves[1] - curves[0]).abs().max()) < 0.06


@pytest.mark.parametrize("precision", PRECISIONS)
def test_resuming_is_exact(precision: Any, tmp_path: Path) -> None:
    def run(**kwargs: Any) -> Any:
        algorithms = [LoRA(dropout=0.1), FusedLayers("all", precision), Unpadding(8), MixedPrecision("bf16")]
        algorithms.append(CUDAGraphs())
        return trained(algorithms, model=tiny_bert(dropout=0.1), batches=plain_batches(6), gpu=True, **kwargs)

    whole = run(save_folder=str(tmp_path), **SAVING)
    resumed = run(load_path=str(tmp_path / "ba2.pt"))
    torch.testing.assert_close(final_weights(resumed), final_weights(whole), rtol=0, atol=0)


def test_a_step_takes_less_memory_than_full_fine_tuning() -> None:
    peaks = []
    for with_lora in (False, True):
        before = torch.cuda.memory_allocated()  # by tests that ran earlier in this process
        model = tiny_model("bert", hidden_size=512, intermediate_size=2048, num_attention_heads=8, layers=4)
        model.cuda().train()
        ours = fused(adapted(model) if with_lora else model, "all")
        optimizer = torch.optim.AdamW([p for p in ours.parameters() if p.requires_grad])
        inputs = on_gpu(batch([64] * 16))
        for step in range(3):
            if step == 2:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            with torch.autocast("cuda", torch.bfloat16):
                loss = ours(**inputs).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del ours, model, optimizer, loss
        torch.cuda.empty_cache()
    assert peaks[1] < 0.8 * peaks[0], peaks

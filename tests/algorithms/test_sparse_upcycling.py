"""Experts: outputs, gradients and balance; optimizer, copies and export; training with other techniques."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.loggers import InMemoryLogger
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification

from composer_speedups import SparseUpcycling, apply, load_sparse_upcycling
from composer_speedups.algorithms.sparse_upcycling.modules import SparseFeedForward, balance_loss, sparse_layers
from composer_speedups.core.errors import ConfigError, Refusal
from composer_speedups.families.flops import batch_lengths, training_flops
from composer_speedups.tasks.classification import Classification
from composer_speedups.tasks.models import _loaded
from composer_speedups.train.config.schema import ModelConfig
from tests.helpers.common import (
    Recorder,
    assert_not_engaged,
    awkward_batches,
    batch,
    final_weights,
    fit_and_close,
    make_trainer,
    microbatches,
    plain_batches,
    tiny_bert,
    trained,
)
from tests.helpers.models import fit_batches, tiny_model
from tests.reference.loop import eval_logits
from tests.reference.tolerance import assert_near


def upcycle(model: nn.Module, optimizer: Any = None, **settings: Any) -> None:
    apply(model, [SparseUpcycling(**settings, load_balancing=0.0)], optimizer)


def upcycled(**settings: Any) -> Any:
    model = tiny_bert()
    upcycle(model, **{"every": 1, **settings})
    return model


def balance(model: Any, *args: Any, **inputs: Any) -> Tensor:
    """The sum of the layers' load-balancing losses of a forward pass."""
    routing = sparse_layers(model)[0].routing
    routing.noted = {}
    model.train()(*args, **inputs)
    return torch.stack(routing.losses()).sum()


def perturb_experts(model: nn.Module) -> None:
    """Give every expert different weights."""
    generator = torch.Generator().manual_seed(1)
    for layer in sparse_layers(model):
        for parameter in layer.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.data.add_(noise.to(parameter.device))


def test_only_routers_are_drawn_from_the_cpu_generator() -> None:
    torch.manual_seed(7)
    expected = [0.02 * torch.randn(4, 32) for _ in range(2)]
    model = tiny_bert()
    torch.manual_seed(7)
    upcycle(model, experts=4, every=1)
    assert_near([layer.router.weight.detach() for layer in sparse_layers(model)], expected, what="routers")


@pytest.mark.parametrize("top_k", [2, 3])
def test_a_layer_is_the_weighted_sum_of_its_experts(top_k: int) -> None:
    model = upcycled(experts=4, top_k=top_k)
    perturb_experts(model)
    layer = sparse_layers(model)[0]
    hidden = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    output = layer(hidden)
    expected = plainly(layer, hidden)
    assert_near([output], [expected], what="outputs")
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    inputs = [hidden, *layer.parameters()]
    actual = torch.autograd.grad(output, inputs, upstream)
    assert_near(actual, torch.autograd.grad(expected, inputs, upstream), what="gradients")
    assert actual[1].abs().max() > 1e-3, "the router learns from the task through the combination weights"


def plainly(layer: SparseFeedForward, hidden: Tensor) -> Tensor:
    """Compute every expert for every token, and weight experts that were not chosen by 0."""
    probabilities = (hidden @ layer.router.weight.T).softmax(-1)
    smallest = probabilities.sort(-1, descending=True).values[..., layer.top_k - 1 : layer.top_k]
    weights = probabilities * (probabilities >= smallest)
    weights = weights / weights.sum(-1, keepdim=True)
    return torch.stack([e(hidden) * weights[..., i : i + 1] for i, e in enumerate(layer.experts)]).sum(0)


@pytest.mark.pins
def test_the_load_balancing_loss_follows_the_paper_on_real_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.rand(12, 4, generator=generator).softmax(-1)
    chosen = probabilities.topk(2).indices
    real = torch.tensor([True] * 7 + [False] * 5)
    loss = balance_loss(probabilities, chosen, real)
    f = [sum(int(e in chosen[t].tolist()) for t in range(7)) / 14 for e in range(4)]
    p = [float(probabilities[:7, e].mean()) for e in range(4)]
    assert float(loss) == pytest.approx(4 * sum(a * b for a, b in zip(f, p, strict=True)))
    even, one_sided = torch.eye(4), torch.eye(4)[[0, 0, 0, 0]]
    assert float(balance_loss(torch.full((4, 4), 0.25), even.argmax(-1, keepdim=True), None)) == pytest.approx(1)
    assert float(balance_loss(one_sided, one_sided.argmax(-1, keepdim=True), None)) == pytest.approx(4)
    assert float(balance_loss(probabilities, chosen, torch.zeros(12))) == 0, "all tokens are padding"


def test_padding_does_not_change_the_load_balancing_loss() -> None:
    model = upcycled()
    narrow = batch([9, 16, 3], 16)
    wide = {k: (nn.functional.pad(v, (0, 6)) if v.dim() == 2 else v) for k, v in narrow.items()}
    unmasked = {k: v for k, v in wide.items() if k != "attention_mask"}
    everything = {**unmasked, "attention_mask": torch.ones_like(wide["attention_mask"])}
    padded, positional, of_all, without = (
        float(loss.detach())
        for loss in (
            balance(model, **wide),
            balance(model, wide["input_ids"], wide["attention_mask"]),
            balance(model, **everything),
            balance(model, **unmasked),
        )
    )
    assert padded == pytest.approx(float(balance(model, **narrow).detach()), rel=1e-5)
    assert positional == pytest.approx(padded, rel=1e-5)
    assert of_all == pytest.approx(without, rel=1e-5)
    assert of_all != pytest.approx(padded, rel=1e-3)


def test_packed_tokens_are_real_and_filler_is_not() -> None:
    routing = sparse_layers(upcycled())[0].routing
    mask = batch([3, 0, 5], 8)["attention_mask"]
    routing.begin(nn.Identity(), (None, mask), {})
    cpu = torch.device("cpu")
    assert routing.real_tokens(torch.Size([1, 10]), cpu).tolist() == [True] * 8 + [False] * 2
    assert routing.real_tokens(torch.Size([3, 8]), cpu).tolist() == mask.bool().flatten().tolist()


def test_new_parameters_join_the_groups_of_the_replaced_ones() -> None:
    model = tiny_bert()
    groups = [{"params": [p for p in model.parameters() if (p.ndim > 1) is matrix]} for matrix in (True, False)]
    optimizer = torch.optim.AdamW(groups)
    upcycle(model, optimizer, experts=3)
    for group, matrix in zip(optimizer.param_groups, (True, False), strict=True):
        assert {id(p) for p in group["params"]} == {id(p) for p in model.parameters() if (p.ndim > 1) is matrix}


def test_experts_keep_mode_dtype_and_frozen_parameters() -> None:
    model = tiny_bert().to(torch.bfloat16).eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layer.1.output" not in name)
    upcycle(model)
    (layer,) = sparse_layers(model)
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    assert not any(m.training for m in layer.modules())
    assert [p.requires_grad for e in layer.experts for p in e.parameters()] == [True, True, False, False] * 4
    assert layer.router.weight.requires_grad
    assert layer(torch.ones(1, 3, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("every", [1, 2])
def test_flops_match_torchs_counter(every: int) -> None:
    model = upcycled(every=every, experts=3, top_k=3)
    full = batch([16, 16, 16, 16])
    with FlopCounterMode(display=False) as counter:
        model(**full).loss.backward()
    lengths = batch_lengths(full)
    assert training_flops(model.config, lengths, "classification") == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_an_export_can_be_loaded_but_not_as_a_stock_model(tmp_path: Path) -> None:
    model = upcycled(experts=3).eval()
    perturb_experts(model)
    model.save_pretrained(tmp_path)
    again = load_sparse_upcycling(tmp_path)
    torch.testing.assert_close(dict(again.named_parameters()), dict(model.named_parameters()), rtol=0, atol=0)
    assert_near(eval_logits(again, awkward_batches()), eval_logits(model, awkward_batches()), what="logits")
    with pytest.raises(ConfigError, match=r"lacks .* encoder weights, bert\.encoder\.layer\.0\.intermediate"):
        _loaded(AutoModelForSequenceClassification, str(tmp_path), ModelConfig(), Classification(), {})
    tiny_bert().save_pretrained(tmp_path / "dense")
    with pytest.raises(ValueError, match="does not have an exported model with experts"):
        load_sparse_upcycling(tmp_path / "dense")


def test_an_exported_masked_lm_with_tied_embeddings_can_be_loaded(tmp_path: Path) -> None:
    model = tiny_model("roberta", "mlm")
    batches = fit_batches(model, awkward_batches())
    upcycle(model)
    model.save_pretrained(tmp_path)
    again: Any = load_sparse_upcycling(tmp_path, AutoModelForMaskedLM)
    assert again.lm_head.decoder.weight is again.get_input_embeddings().weight
    assert_near(eval_logits(again, batches), eval_logits(model, batches), what="logits")


def test_wrong_settings_and_models_are_refused() -> None:
    chunked = tiny_bert()
    chunked.config.chunk_size_feed_forward = 4
    model: Any
    for model, settings, message in [
        (tiny_bert(), {"every": 3}, "has 2 feed-forward layers like those of BERT.*, and every=3; remove it"),
        (nn.Linear(2, 2), {}, "no Hugging Face model"),
        (chunked, {}, "chunk_size_feed_forward to 0"),
    ]:
        with pytest.raises(Refusal, match=f"^sparse_upcycling: .*{message}"):
            upcycle(model, **settings)
    with pytest.raises(Refusal, match="the load-balancing loss needs Composer's Trainer"):
        apply(tiny_bert(), [SparseUpcycling()])
    trainer = trained([SparseUpcycling()], batches=plain_batches(1))
    make_trainer([SparseUpcycling()], model=trainer.state.model).close()
    with pytest.raises(Refusal, match=r"already has layers of experts with .*'experts': 4.*build a new model"):
        make_trainer([SparseUpcycling(experts=2)], model=trainer.state.model)


@pytest.mark.parametrize("rows", [100, 2], ids=["whole batch", "microbatches"])
def test_the_loss_of_a_batch_includes_the_load_balancing_loss(rows: int) -> None:
    recorder = Recorder()
    logger = InMemoryLogger()
    model, batches = tiny_bert(), plain_batches(1)
    settings = {"model": copy.deepcopy(model), "callbacks": [recorder], "loggers": [logger]}
    trainer = make_trainer([SparseUpcycling(every=1, load_balancing=0.5)], **settings, **microbatches(batches, rows))
    sparse = copy.deepcopy(trainer.state.model.model).train()
    fit_and_close(trainer)
    expected, balances = 0.0, []
    for start in range(0, 4, rows):
        micro = {k: v[start : start + rows] for k, v in batches[0].items()}
        balances.append(balance(sparse, **micro))
        task = sparse(**micro).loss
        loss = (task + 0.5 * balances[-1]) * len(micro["labels"]) / 4
        loss.backward()
        expected += float(loss.detach())
    assert recorder.losses == pytest.approx([expected], rel=1e-5)
    gradients = {n: p.grad for n, p in sparse.named_parameters()}
    assert_near(recorder.first_gradients, gradients, what="gradients")
    router = next(g for n, g in gradients.items() if "router" in n)
    assert router.abs().max() > 1e-4, "at first, routers get gradients from the load-balancing loss only"
    ((_, logged),) = logger.data["sparse_upcycling/load_balancing_loss"]
    assert logged == pytest.approx(float(torch.stack(balances).mean().detach()) / 2, rel=1e-5)


def test_experts_that_do_not_run_are_detected() -> None:
    technique = SparseUpcycling()
    trainer = make_trainer([technique])
    (layer,) = sparse_layers(trainer.state.model)
    layer._dispatch = lambda x, chosen: layer.experts[0](x)[:, None].expand(*chosen.shape, -1)  # type: ignore
    assert_not_engaged(trainer, "only 0 experts of a layer ran in the first batch")


def test_gradient_checkpointing_does_not_change_the_training() -> None:
    results = []
    for checkpointing in (False, True):
        model = tiny_bert()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        trainer = trained([SparseUpcycling(every=1, load_balancing=0.5)], model=model, batches=awkward_batches())
        results.append(final_weights(trainer))
    assert_near(results[1], results[0], what="weights")


def test_reentrant_checkpointing_is_refused_in_the_first_batch() -> None:
    model = tiny_bert()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(Refusal, match="without use_reentrant"):
        trained([SparseUpcycling()], model=model)


def test_under_autocast_the_router_computes_in_float32() -> None:
    model = upcycled().eval()
    dense = tiny_bert().eval()
    (layer, *_) = sparse_layers(model)
    seen: list[Tensor] = []
    layer.experts[0].register_forward_hook(lambda _m, _i, output: seen.append(output))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        sparse, plain = (m(**batch([5, 9])).logits for m in (model, dense))
        assert layer(torch.randn(1, 3, 32)).dtype == torch.bfloat16
    assert seen[0].dtype == torch.bfloat16
    assert_near([sparse], [plain], torch.bfloat16, "logits")

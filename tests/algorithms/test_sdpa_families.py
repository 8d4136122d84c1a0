"""SDPA with every kernel on BERT, RoBERTa, DistilBERT and ELECTRA, with a classifier or a masked-LM head."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from composer_speedups import SDPAAttention, TorchCompile, apply_sdpa_attention
from composer_speedups.core.errors import TechniqueError
from tests.helpers.common import Recorder, awkward_batches, batch, final_weights, make_trainer, plain_batches, trained
from tests.helpers.exhaustive import family_params, others_exhaustive
from tests.helpers.models import FAMILIES, HEADS, Family, Head, fit_batches, real_logits, tiny_model
from tests.reference.loop import gradients, train_plainly
from tests.reference.tolerance import assert_near

every_model = pytest.mark.parametrize(
    ("family", "head"), others_exhaustive(product(FAMILIES, HEADS), lambda model: model[0] == "bert")
)
every_family = pytest.mark.parametrize("family", family_params(FAMILIES))


@every_model
@pytest.mark.parametrize("backend", ["auto", "math"])
@pytest.mark.pins
def test_outputs_and_gradients_match_eager(family: Family, head: Head, backend: Any) -> None:
    eager, model = tiny_model(family, head), tiny_model(family, head)
    assert apply_sdpa_attention(model, backend) == {"": "eager"}
    batches = fit_batches(model, awkward_batches())
    assert_near(real_logits(model, batches), real_logits(eager, batches), what="logits")
    for shape in batches:
        for each in (eager, model):
            each.zero_grad()
            each(**shape).loss.backward()
        assert_near(gradients(model), gradients(eager), what="gradients")


@every_model
@pytest.mark.pins
def test_the_evidence_names_the_kernel_of_the_forward_pass(family: Family, head: Head) -> None:
    model, technique, recorder = tiny_model(family, head), SDPAAttention(), Recorder()
    batches = fit_batches(model, plain_batches(3))
    expected = train_plainly(model, batches)
    trainer = trained([technique], model=model, batches=batches, callbacks=[recorder])
    assert technique.evidence["implementation_before"] == "eager"
    assert technique.evidence["kernel"].startswith("scaled_dot_product_flash_attention")
    assert technique.evidence["kernel_seen_in"] == "forward pass"
    assert_near(recorder.losses, expected.losses, what="losses")
    weights = {n.removeprefix("model."): w for n, w in final_weights(trainer).items()}
    assert_near(weights, expected.weights, what="weights after training")


@every_family
def test_compiled_code_is_probed(family: Family) -> None:
    """The configs of the families name heads, sizes and dropout differently."""
    model, technique = tiny_model(family, dropout=0.1, layers=1), SDPAAttention()
    batches = fit_batches(model, plain_batches(1))
    trained([technique, TorchCompile("blocks", backend="eager")], model=model, batches=batches)
    assert technique.evidence["kernel"] == "scaled_dot_product_attention_math", "the CPU's kernel if there is dropout"
    assert technique.evidence["kernel_seen_in"] == "probe"


@pytest.mark.parametrize("given", ["inputs_embeds", "mask of queries and keys"])
def test_the_kernel_is_recorded_for_batches_that_cannot_be_probed(given: str) -> None:
    model, technique = tiny_model("bert"), SDPAAttention()
    batches = plain_batches(2)
    for each in batches:
        if given == "inputs_embeds":
            each["inputs_embeds"] = model.get_input_embeddings()(each.pop("input_ids")).detach()
        else:
            width = each["input_ids"].shape[1]
            each["attention_mask"] = each["attention_mask"].bool()[:, None, None, :].expand(-1, 1, width, -1)
    trained([technique], model=model, batches=batches)
    assert "flash" in technique.evidence["kernel"]
    assert technique.evidence["kernel_seen_in"] == "forward pass"


@pytest.mark.gpu
@every_model
@pytest.mark.parametrize("backend", ["efficient", "cudnn", "math"])
def test_every_kernel_that_accepts_padding_runs_on_every_family(family: Family, head: Head, backend: Any) -> None:
    _check_on_gpu(family, head, backend, [[32, 17, 5, 32], [9, 30, 32, 1]])


@pytest.mark.gpu
@every_model
def test_flash_runs_on_every_family_without_padding(family: Family, head: Head) -> None:
    _check_on_gpu(family, head, "flash", [[32] * 4, [32] * 4])


@pytest.mark.gpu
@every_family
def test_flash_is_refused_on_every_family_with_padding(family: Family) -> None:
    model = tiny_model(family)
    batches = fit_batches(model, plain_batches(1))
    with pytest.raises(TechniqueError, match="flash kernel cannot run on the first batch"):
        trained([SDPAAttention("flash")], model=model, batches=batches, gpu=True, precision="amp_bf16")


def _check_on_gpu(family: Family, head: Head, backend: Any, lengths: list[list[int]]) -> None:
    """Check that the bf16 error of logits and first gradients is at most 1.5 times eager attention's.

    If the input of a ReLU (as in DistilBERT's head) rounds across zero, gradients change a lot, so one of three
    models must pass.
    """
    excess = []
    for seed in range(3):
        exact, technique = tiny_model(family, head, seed=seed), SDPAAttention(backend)
        batches = fit_batches(exact, [batch(each, 32, seed=i) for i, each in enumerate(lengths)])
        expected = [*real_logits(exact, batches), *train_plainly(exact, batches).first_gradients.values()]
        by_kernel, by_eager = (
            _distance(_in_bf16(tiny_model(family, head, seed=seed), batches, t), expected) for t in ([technique], [])
        )
        excess.append(by_kernel - 1.5 * by_eager)
        assert by_eager < 0.05
        assert backend in technique.evidence["kernel"].split("_")
        assert technique.evidence["kernel_seen_in"] == "forward pass"
    assert min(excess) < 2e-3, excess


def _in_bf16(model: Any, batches: list[Any], techniques: list[Any]) -> list[torch.Tensor]:
    """Return the logits of every batch, then the gradients of the first batch."""
    recorder, bf16 = Recorder(), {"gpu": True, "precision": "amp_bf16"}
    trainer = make_trainer(techniques, model=model, batches=batches, callbacks=[recorder], **bf16)
    on_gpu = [{name: value.cuda() for name, value in each.items()} for each in batches]
    with torch.autocast("cuda", torch.bfloat16):
        logits = real_logits(trainer.state.model.model, on_gpu)
    trainer.fit()
    trainer.close()
    return [x.cpu() for x in (*logits, *recorder.first_gradients.values())]


def _distance(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the relative error, as norms over all tensors together."""
    one, other = (torch.cat([x.flatten() for x in each]) for each in (actual, expected))
    return float((one - other).norm() / other.norm())

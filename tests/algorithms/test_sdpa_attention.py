"""SDPA: every kernel on four families, the kernel that ran, refusals, and restored attention."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from composer.core import State
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers import BertForMultipleChoice, DebertaV2Config, MPNetConfig, PreTrainedModel
from transformers.models.auto import AutoModelForSequenceClassification
from transformers.models.bert import modeling_bert

from composer_speedups import SDPAAttention, TorchCompile, apply_sdpa_attention
from composer_speedups.core.errors import TechniqueError
from composer_speedups.surgery.already_applied import NoEffectWarning
from tests.helpers.common import (
    VOCABULARY,
    Batch,
    Recorder,
    assert_not_engaged,
    awkward_batches,
    batch,
    final_weights,
    fit_and_close,
    make_trainer,
    plain_batches,
    tiny_bert,
    tiny_config,
    trained,
)
from tests.helpers.exhaustive import family_params, others_exhaustive
from tests.helpers.models import FAMILIES, HEADS, Family, Head, fit_batches, real_logits, tiny_model
from tests.reference.loop import train_plainly
from tests.reference.tolerance import assert_near


def test_models_inside_another_module_are_changed() -> None:
    outer = nn.ModuleDict({"encoder": tiny_bert(), "head": nn.Linear(2, 2)})
    assert apply_sdpa_attention(outer) == {"encoder": "eager"}
    assert apply_sdpa_attention(outer) == {"encoder": "sdpa"}
    with pytest.warns(NoEffectWarning, match="no Hugging Face model"):
        assert apply_sdpa_attention(nn.Linear(2, 2)) == {}


def test_recording_the_kernel_draws_no_random_numbers() -> None:
    states = []
    for algorithms in ([SDPAAttention()], []):
        trained(algorithms)
        states.append(torch.random.get_rng_state())
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


@pytest.mark.gpu
def test_the_probe_draws_no_random_numbers_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[torch.Tensor] = []
    probe = SDPAAttention._kernel_for

    def noted(self: SDPAAttention, state: State) -> str | None:
        states.append(torch.cuda.get_rng_state())
        kernel = probe(self, state)
        states.append(torch.cuda.get_rng_state())
        return kernel

    monkeypatch.setattr(SDPAAttention, "_kernel_for", noted)
    trained([SDPAAttention()], gpu=True)
    assert len(states) == 2
    torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)


def test_flash_is_refused_on_a_cpu() -> None:
    with pytest.raises(TechniqueError, match="the flash kernel needs a CUDA GPU"):
        make_trainer([SDPAAttention("flash")])


def without_sdpa(config: type[DebertaV2Config] | type[MPNetConfig]) -> PreTrainedModel:
    """Return a tiny classifier whose family does not support scaled_dot_product_attention in transformers."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    settings = config(vocab_size=VOCABULARY, max_position_embeddings=64, **sizes)  # type: ignore[arg-type]
    return AutoModelForSequenceClassification.from_config(settings)


@pytest.mark.parametrize("config", [DebertaV2Config, MPNetConfig])
@pytest.mark.parametrize("backend", ["auto", "math"])
def test_models_without_sdpa_are_refused_at_init(config: Any, backend: Any) -> None:
    model = without_sdpa(config)
    name = type(model).__name__
    with pytest.raises(ValueError, match=f"^{name} does not support"):
        apply_sdpa_attention(model, backend)
    with pytest.raises(TechniqueError, match=f"^sdpa_attention: {name} does not support"):
        make_trainer([SDPAAttention(backend)], model=model)
    assert model.config._attn_implementation == "eager"
    technique = SDPAAttention(backend, on_unavailable="warn")
    with pytest.warns(UserWarning, match=f"continuing without sdpa_attention: {name} does not support"):
        make_trainer([technique], model=model).close()
    assert technique.engaged is False


def test_if_one_of_several_models_refuses_none_is_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bert = tiny_bert()
    both = nn.ModuleDict({"bert": bert, "mpnet": without_sdpa(MPNetConfig)})
    with pytest.raises(ValueError, match=r"^MPNetForSequenceClassification does not support"):
        apply_sdpa_attention(both)
    assert bert.config._attn_implementation == "eager"
    assert not hasattr(bert.config, "_attn_was_changed")

    # If transformers cannot read a class's source, as in a notebook, it only logs a warning.
    fixed = tiny_bert(seed=1)
    monkeypatch.setattr(fixed, "_can_set_attn_implementation", lambda: False)
    with pytest.raises(ValueError, match=r"^BertForSequenceClassification keeps eager attention"):
        apply_sdpa_attention(nn.ModuleDict({"bert": bert, "fixed": fixed}), "math")
    assert [m.config._attn_implementation for m in (bert, fixed)] == ["eager", "eager"]


def choices(rows: int, count: int, mask: bool) -> Batch:
    """Return ``count`` candidate answers for each of ``rows`` questions: token ids (rows, choices, tokens)."""
    flat = batch([9, 4, 7, 12, 5, 8][: rows * count], 12)
    inputs = {name: value.view(rows, count, -1) for name, value in flat.items() if value.ndim == 2}
    if not mask:
        del inputs["attention_mask"]
    return {**inputs, "labels": torch.arange(rows) % count}


@pytest.mark.parametrize("mask", [True, False])
def test_multiple_choice_batches_are_trained_and_probed(mask: bool) -> None:
    torch.manual_seed(0)
    model: Any = BertForMultipleChoice._from_config(tiny_config(), attn_implementation="eager")
    technique, batches = SDPAAttention(), [choices(2, 3, mask)]
    trainer = make_trainer([technique], model=model, batches=batches)
    probed = []
    watch = technique.watch

    def watch_and_record(state: Any) -> None:
        watch(state)
        probed.append(technique._kernel)

    technique.watch = watch_and_record  # type: ignore[method-assign]
    fit_and_close(trainer)
    assert probed[0] == technique.evidence["kernel"], "the probe uses the forward pass's shapes"
    assert technique.evidence["kernel_seen_in"] == "forward pass"


def test_attention_restored_after_init_is_detected() -> None:
    trainer = make_trainer([SDPAAttention()])
    trainer.state.model.model.set_attn_implementation("eager")  # type: ignore[union-attr, operator]
    assert_not_engaged(trainer, "the model's attention is eager")


def test_closing_an_earlier_trainer_keeps_the_attention_of_a_later_one() -> None:
    model = tiny_bert()
    earlier, later = (make_trainer([SDPAAttention()], model=model) for _ in range(2))
    earlier.close()
    assert model.config._attn_implementation == "sdpa"
    later.close()
    assert model.config._attn_implementation == "eager"
    assert "_sdpa_attention_of" not in vars(model)


def test_a_model_whose_attention_ignores_the_setting_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The config says SDPA, but the forward pass runs eager attention."""
    eager = modeling_bert.eager_attention_forward

    class AlwaysEager:
        def get_interface(self, *_: Any) -> Any:
            return eager

    technique = SDPAAttention()
    trainer = make_trainer([technique])
    monkeypatch.setattr(modeling_bert, "ALL_ATTENTION_FUNCTIONS", AlwaysEager())
    assert_not_engaged(trainer, "ran no SDPA kernel")


def test_a_forward_pass_that_raises_removes_the_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer([SDPAAttention()])
    monkeypatch.setattr(modeling_bert.BertPooler, "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fit_and_close(trainer)
    assert not _get_current_dispatch_mode_stack()


@pytest.mark.parametrize(("before", "after"), [("eager", "eager"), ("sdpa", "sdpa"), ("sdpa_only_math", "eager")])
def test_if_its_kernel_cannot_run_the_attention_is_restored(
    before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If an earlier call already set this kernel, the attention becomes eager."""

    def fails(*_: Any) -> None:
        raise RuntimeError("No available kernel. Aborting execution.")

    model = tiny_bert()
    if before == "sdpa_only_math":
        apply_sdpa_attention(model, "math")
    else:
        model.set_attn_implementation(before)
    technique = SDPAAttention("math", on_unavailable="warn")
    trainer = make_trainer([technique], model=model, batches=plain_batches(2))
    monkeypatch.setattr(SDPAAttention, "_kernel_for", fails)
    with pytest.warns(UserWarning, match="the math kernel cannot run on the first batch"):
        trainer.fit()
    trainer.close()
    assert technique.evidence["going_on_with"] == after
    assert model.config._attn_implementation == after


every_model = pytest.mark.parametrize(
    ("family", "head"), others_exhaustive(product(FAMILIES, HEADS), lambda model: model[0] == "bert")
)
every_family = pytest.mark.parametrize("family", family_params(FAMILIES))


@every_model
@pytest.mark.parametrize(("backend", "kernel"), [("auto", "flash_attention"), ("math", "attention_math")])
@pytest.mark.pins
def test_a_run_matches_eager_attention_and_names_its_kernel(
    family: Family, head: Head, backend: Any, kernel: str
) -> None:
    eager, model, technique, recorder = (
        tiny_model(family, head),
        tiny_model(family, head),
        SDPAAttention(backend),
        Recorder(),
    )
    batches = fit_batches(model, awkward_batches())
    expected = train_plainly(eager, batches)
    trainer = make_trainer([technique], model=model, batches=batches, callbacks=[recorder])
    assert_near(real_logits(model, batches), real_logits(eager, batches), what="logits")
    fit_and_close(trainer)
    assert technique.evidence["implementation_before"] == "eager"
    assert technique.evidence["kernel"].startswith(f"scaled_dot_product_{kernel}")
    assert technique.evidence["kernel_seen_in"] == "forward pass"
    assert_near(recorder.losses, expected.losses, what="losses")
    assert_near(recorder.first_gradients, expected.first_gradients, what="gradients of the first batch")
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
    for inputs in batches:
        if given == "inputs_embeds":
            inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
        else:
            width = inputs["input_ids"].shape[1]
            inputs["attention_mask"] = inputs["attention_mask"].bool()[:, None, None, :].expand(-1, 1, width, -1)
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
        batches = fit_batches(exact, [batch(lengths_of_rows, 32, seed=i) for i, lengths_of_rows in enumerate(lengths)])
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
    on_gpu = [{name: value.cuda() for name, value in inputs.items()} for inputs in batches]
    with torch.autocast("cuda", torch.bfloat16):
        logits = real_logits(trainer.state.model.model, on_gpu)
    fit_and_close(trainer)
    return [x.cpu() for x in (*logits, *recorder.first_gradients.values())]


def _distance(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the relative error, as norms over all tensors together."""
    one, other = (torch.cat([x.flatten() for x in tensors]) for tensors in (actual, expected))
    return float((one - other).norm() / other.norm())

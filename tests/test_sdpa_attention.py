"""SDPA from an eager baseline: outputs, gradients, and the kernel that ran."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from composer.algorithms.warnings import NoEffectWarning
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers.models.bert import modeling_bert

from composer_speedups import SDPAAttention, apply_sdpa_attention
from composer_speedups.errors import NotEngagedError, TechniqueError
from tests.common import awkward_batches, batch, make_trainer, plain_batches, tiny_bert
from tests.reference.loop import eval_logits, gradients
from tests.reference.tolerance import assert_near


@pytest.mark.parametrize("backend", ["auto", "math"])
@pytest.mark.pins
def test_outputs_and_gradients_match_eager(backend: Any) -> None:
    eager, model = tiny_bert(), tiny_bert()
    assert eager.config._attn_implementation == "eager"
    assert apply_sdpa_attention(model, backend) == {"": "eager"}
    batches = awkward_batches()
    assert_near(eval_logits(model, batches), eval_logits(eager, batches))
    for shape in batches:
        for each in (eager, model):
            each.zero_grad()
            each(**shape).loss.backward()
        assert_near(gradients(model), gradients(eager))


def test_the_mask_reaches_a_forced_kernel() -> None:
    """transformers gives a custom attention no mask unless a mask function is registered with it."""
    model = tiny_bert().eval()
    apply_sdpa_attention(model, "math")
    padded = plain_batches(1)[0]
    row, tokens = 1, 7
    alone = model(input_ids=padded["input_ids"][row : row + 1, :tokens]).logits[0]
    assert padded["attention_mask"][row].sum() == tokens
    assert_near([model(**padded).logits[row]], [alone])


def test_a_module_around_the_model_is_changed_inside() -> None:
    outer = nn.ModuleDict({"encoder": tiny_bert(), "head": nn.Linear(2, 2)})
    assert apply_sdpa_attention(outer) == {"encoder": "eager"}
    assert apply_sdpa_attention(outer) == {"encoder": "sdpa"}
    with pytest.warns(NoEffectWarning, match="no Hugging Face model"):
        assert apply_sdpa_attention(nn.Linear(2, 2)) == {}


def test_the_kernel_is_recorded() -> None:
    for technique, kernel in [(SDPAAttention(), "flash"), (SDPAAttention("math"), "math")]:
        trainer = make_trainer([technique])
        trainer.fit()
        trainer.close()
        assert kernel in technique.evidence["kernel"]
        assert technique.evidence["kernel_seen_in"] == "forward pass"
        assert technique.evidence["implementation_before"] == "eager"


def test_looking_at_the_kernel_draws_no_random_numbers() -> None:
    states = []
    for algorithms in ([SDPAAttention()], []):
        trainer = make_trainer(algorithms)
        trainer.fit()
        trainer.close()
        states.append(torch.random.get_rng_state())
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


def test_bad_backends_and_models_are_refused() -> None:
    wrong: Any = "fast"
    with pytest.raises(ValueError, match="backend must be one of"):
        SDPAAttention(wrong)
    with pytest.raises(ValueError, match="backend must be one of"):
        apply_sdpa_attention(tiny_bert(), wrong)
    with pytest.raises(TechniqueError, match="the flash kernel needs a CUDA GPU"):
        make_trainer([SDPAAttention("flash")])


def test_attention_changed_back_after_init_is_noticed() -> None:
    trainer = make_trainer([SDPAAttention()])
    trainer.state.model.model.set_attn_implementation("eager")  # type: ignore[union-attr, operator]
    with pytest.raises(NotEngagedError, match="the model's attention is eager"):
        trainer.fit()
    trainer.close()


def test_a_model_whose_attention_ignores_the_setting_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting says SDPA, the forward pass runs something else: what ran decides."""
    eager = modeling_bert.eager_attention_forward

    class AlwaysEager:
        def get_interface(self, *_: Any) -> Any:
            return eager

    technique = SDPAAttention()
    trainer = make_trainer([technique])
    monkeypatch.setattr(modeling_bert, "ALL_ATTENTION_FUNCTIONS", AlwaysEager())
    with pytest.raises(NotEngagedError, match="ran none of its kernels"):
        trainer.fit()
    trainer.close()


def test_a_forward_pass_that_raises_leaves_no_recorder_on(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer([SDPAAttention()])
    monkeypatch.setattr(modeling_bert.BertPooler, "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.fit()
    trainer.close()
    assert not _get_current_dispatch_mode_stack()


@pytest.mark.gpu
def test_flash_is_refused_on_padded_batches_and_runs_on_full_ones() -> None:
    bf16: dict[str, Any] = {"gpu": True, "precision": "amp_bf16"}
    trainer = make_trainer([SDPAAttention("flash")], **bf16)
    with pytest.raises(TechniqueError, match="flash kernel cannot run on the first batch"):
        trainer.fit()
    trainer.close()
    full = plain_batches(2)
    for each in full:
        each["attention_mask"].fill_(1)
    technique = SDPAAttention("flash")
    trainer = make_trainer([technique], batches=full, **bf16)
    trainer.fit()
    trainer.close()
    assert technique.evidence["kernel"] == "scaled_dot_product_flash_attention"


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["efficient", "cudnn", "math"])
def test_a_forced_kernel_runs_in_bf16_and_is_recorded(backend: Any) -> None:
    reference, technique = tiny_bert(), SDPAAttention(backend)
    batches = [batch([32, 17, 5, 32], seed=i) for i in range(2)]
    trainer = make_trainer([technique], batches=batches, gpu=True, precision="amp_bf16")
    on_gpu = [{k: v.cuda() for k, v in b.items()} for b in batches]
    with torch.autocast("cuda", torch.bfloat16):
        logits = [x.cpu() for x in eval_logits(trainer.state.model.model, on_gpu)]
    assert_near(logits, eval_logits(reference, batches), torch.bfloat16)
    trainer.fit()
    trainer.close()
    assert backend in technique.evidence["kernel"]

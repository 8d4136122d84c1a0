"""Subclasses, wrappers and modules of one's own around an unpadded encoder compute what they compute without it."""

from __future__ import annotations

import copy
import pickle
from abc import ABC
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from transformers import BertForSequenceClassification, BertForTokenClassification

from composer_speedups.algorithms.fused_layers.fusing import fuse
from composer_speedups.algorithms.unpadding.encoder_swap import restore_encoders, unpad
from composer_speedups.packing.encoder import unpadded_encoders, with_counted_rows
from tests.helpers.common import Batch, batch, tiny_bert, tiny_config, without_labels
from tests.helpers.exhaustive import others_exhaustive
from tests.helpers.models import FUSED, Family, fit_batches, tiny_model
from tests.helpers.unpadded import compared, observed, way
from tests.reference.tolerance import assert_near

pytestmark = pytest.mark.outside


@pytest.fixture(autouse=True)
def _own_accelerator() -> Iterator[None]:
    """accelerate keeps one state per process, which an earlier test's Trainer may have set."""
    state = pytest.importorskip("accelerate.state")
    state.AcceleratorState._reset_state(True)
    yield
    state.AcceleratorState._reset_state(True)


def of(kind: Any, **settings: Any) -> Any:
    torch.manual_seed(0)
    config = tiny_config(initializer_range=0.2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **settings)
    return kind._from_config(config, attn_implementation="eager")


def pair(model: Any, **settings: Any) -> tuple[Any, Any]:
    changed = copy.deepcopy(model)
    unpad(changed, 8, **{"check": "auto", **settings})
    return model, changed


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.view(-1, 2), labels.view(-1))


def tokens(*, padding: bool = False) -> Batch:
    inputs = batch([5, 12, 9])
    labels = torch.arange(36).view(3, 12) % 2
    return {**inputs, "labels": labels if padding else labels.masked_fill(inputs["attention_mask"] == 0, -100)}


# The arguments of a forward of one's own.


class AnyArguments(BertForTokenClassification):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        ids, mask, labels = args
        return token_loss(self.classifier(self.bert(ids, mask)[0]), labels)


class PositionalOnly(BertForTokenClassification):
    def forward(self, input_ids: Tensor, /, attention_mask: Any = None, tags: Any = None) -> Any:
        return super().forward(input_ids, attention_mask, labels=tags).loss


@pytest.mark.parametrize("kind", [AnyArguments, PositionalOnly])
def test_positional_arguments_stay_positional(kind: Any) -> None:
    reference, model = pair(of(kind))
    given = [tokens()[name] for name in ("input_ids", "attention_mask", "labels")]
    ran = [compared(reference, model, lambda module: module(*given)) for _ in range(3)]
    assert ran[-1] == "packed"


# Several heads of one encoder, and models inside others.


@pytest.mark.parametrize("order", [["tokens", "rows"], ["rows", "tokens"]])
def test_two_heads_of_one_encoder(order: list[str]) -> None:
    reference = nn.ModuleDict({"tokens": tiny_model("bert", "tokens"), "rows": tiny_bert()})
    reference["tokens"].bert = reference["rows"].bert
    model = copy.deepcopy(reference)
    for name in order:
        unpad(model[name], 8)
    ran = []
    for name, inputs in (("tokens", tokens(padding=True)), ("tokens", tokens()), ("rows", batch([5, 12, 9]))):
        ran.append(compared(reference[name], model[name], lambda module: module(**inputs).loss))  # noqa: B023
    assert ran == ["padded", "packed", "packed"]
    flipped = {name: values.flip(1) for name, values in without_labels(batch([5, 12, 9])).items()}
    assert way(observed(lambda: model["tokens"](**flipped))) == "padded", "the other head reads first slots"


def test_a_model_called_inside_another_has_its_own_call() -> None:
    """The student has labels; its teacher gets none, and its logits are read at padding."""
    reference, model = pair(tiny_model("bert", "tokens").train(), check="never")
    inputs = tokens()
    teachers = {m: tiny_model("bert", "tokens", seed=1) for m in (reference, model)}
    unpad(teachers[model], 8, check="auto")
    for student, teacher in teachers.items():

        def add(module: Any, _: Any, logits: Tensor, teacher: Any = teacher) -> Tensor:
            return logits + teacher(**without_labels(inputs)).logits.mean(1, True) if module.training else logits

        student.classifier.register_forward_hook(add)
    assert observed(lambda: model(**inputs))["padded_encoder"] == 1, "the teacher's, whose reader is unknown"
    with pytest.raises(ValueError, match="the loss reads outputs at padding positions"):
        model(**inputs).loss.backward()


# What a head reads.


def test_labels_in_bfloat16() -> None:
    for labels in (torch.ones(3), torch.ones(3, 2)):
        kind = {"num_labels": 1} if labels.ndim == 1 else {"problem_type": "multi_label_classification"}
        reference, model = pair(of(BertForSequenceClassification, **kind).bfloat16())
        inputs = {**batch([5, 12, 9]), "labels": labels.bfloat16()}
        assert_near([model(**inputs).loss.float()], [reference(**inputs).loss.float()], torch.bfloat16)


def test_a_gradient_that_overflows_is_no_reading_of_padding() -> None:
    _, model = pair(tiny_bert().bert)
    inputs = without_labels(batch([5, 12, 9]))
    mask, ran = inputs["attention_mask"][..., None], []
    for scale in (float("inf"), 1.0, float("inf")):  # fp16 overflows at first, and now and then
        ran.append(way(observed(lambda: ((model(**inputs)[0] * mask).sum() * scale).backward())))  # noqa: B023
    assert ran == ["padded", "padded", "packed"]


# The caller's code around a bare model, of which the first batch with gradients stays padded.


def pooled(model: Any, inputs: Batch) -> Tensor:
    mask = inputs["attention_mask"][..., None]
    return ((model(**without_labels(inputs))[0] * mask).sum(1) / mask.sum(1)).square().sum()


def recomputed(model: Any, inputs: Batch) -> Tensor:
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    hidden: Any = checkpoint(lambda i, m: model(i, m).last_hidden_state, ids, mask, use_reentrant=False)
    return (hidden * mask[..., None]).square().mean()  # type: ignore[no-any-return]


def changed_in_place(model: Any, inputs: Batch) -> Tensor:
    hidden = model(**without_labels(inputs)).last_hidden_state
    hidden[inputs["attention_mask"] == 0] = -1e9  # as max pooling does
    return hidden.max(1).values.square().sum()  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("loss", [pooled, recomputed, changed_in_place])
@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_the_first_batch_with_gradients_shows_that_padding_is_not_read(family: Family, loss: Any) -> None:
    reference, model = pair(tiny_model(family).base_model)
    (inputs,) = fit_batches(reference, [batch([5, 12, 9])])
    ran = [compared(reference, model, lambda module: loss(module, inputs)) for _ in range(3)]
    assert ran[0] == "padded"
    assert ran[2] == "packed"


def test_a_bare_model_whose_padding_is_read_is_refused_unless_check_is_never() -> None:
    reference, model = pair(tiny_bert().bert)
    inputs = without_labels(batch([5, 12, 9]))
    with pytest.raises(ValueError, match=r"the loss reads outputs at padding positions.*check='never'"):
        model(**inputs).last_hidden_state.mean(1).square().sum().backward()
    never = pair(reference, check="never")[1]
    assert way(observed(lambda: never(**inputs)[0].mean(1).sum().backward())) == "packed"


def test_a_frozen_encoder_is_observed_and_a_frozen_model_returns_plain_tensors() -> None:
    _, model = pair(tiny_model("bert", "tokens"))
    model.bert.requires_grad_(False)
    inputs = tokens()
    labels = inputs.pop("labels")
    losses = [observed(lambda: token_loss(model(**inputs).logits, labels).backward()) for _ in range(2)]
    assert [way(ran) for ran in losses] == ["padded", "packed"]
    for frozen, name in ((tiny_bert().bert, "last_hidden_state"), (tiny_model("bert", "tokens"), "logits")):
        reference, model = pair(frozen.requires_grad_(False))
        for _ in range(2):
            output, expected = (module(**inputs)[name] for module in (model, reference))
            assert not output.requires_grad
            assert_near([torch.from_numpy(output.numpy())], [expected])


class AbstractLast(nn.Module, ABC):
    def __init__(self) -> None:
        super().__init__()
        self.bert = tiny_bert().bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Any = None) -> Tensor:
        return self.bert(input_ids, attention_mask)[1].square().sum()  # type: ignore[no-any-return]


class AbstractModel(BertForSequenceClassification, ABC):
    pass


def test_abstract_classes_and_pickles() -> None:
    inputs = batch([5, 12, 9])
    for made, loss in (
        (AbstractLast(), lambda module: module(**inputs)),
        (of(AbstractModel), lambda module: module(**inputs).loss),
    ):
        reference, model = pair(made)
        loaded = pickle.loads(pickle.dumps(model))
        for module in (model, loaded):
            ran = [compared(reference, module, loss) for _ in range(2)]
            assert ran[-1] == "packed"
        assert restore_encoders(model)
        assert type(model) is type(reference)


# accelerate.


@pytest.mark.parametrize("order", ["apply, prepare", "prepare, apply"])
def test_mixed_precision_of_accelerate(order: str) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    reference, model = tiny_bert(), tiny_bert()
    accelerator.prepare_model(reference)
    for step in order.split(", "):
        unpad(model, 8, check="auto") if step == "apply" else accelerator.prepare_model(model)
    inputs = batch([5, 12, 9])
    for _ in range(2):
        output, expected = model(**inputs), reference(**inputs)
        output.loss.backward()
        assert_near([output.logits], [expected.logits], torch.bfloat16)
    assert way(observed(lambda: model(**inputs))) == "packed"
    restore_encoders(model)
    assert_near([model(**inputs).logits], [expected.logits], torch.bfloat16)


def test_a_model_that_accelerate_gives_back_still_sees_its_labels() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    reference, model = pair(tiny_model("bert", "tokens"))
    model = accelerator.unwrap_model(accelerator.prepare_model(model), keep_fp32_wrapper=False)
    assert compared(reference, model, lambda module: module(**tokens(padding=True)).loss) == "padded"


# torch.compile.


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "fused", "counted"),
    list(product(["bert", "modernbert", "deberta_v2", "mpnet"], [False, True], [False, True])),
)
def test_a_compiled_model_with_and_without_row_lengths(family: Family, fused: bool, counted: bool) -> None:
    if fused and family not in FUSED:
        pytest.skip(f"fused_layers does not support {family}")
    reference, model = pair(tiny_model(family, layers=1))
    if fused:
        fuse(model)
    torch.compiler.reset()
    call: Any = torch.compile(model, backend="eager")
    for lengths in ([5, 12, 9], [7, 3, 12]):
        (inputs,) = fit_batches(reference, [batch(lengths)])

        def loss(module: Any, inputs: Batch = inputs) -> Tensor:
            if module is not model or not counted:
                return (call if module is model else module)(**inputs).loss  # type: ignore[no-any-return]
            with with_counted_rows(model, inputs, inputs):
                return call(**inputs).loss  # type: ignore[no-any-return]

        compared(reference, model, loss)
    assert len(unpadded_encoders(model)) == 1


# A wrapper at the name of a part of the model.


class Wrapper(nn.Module):
    """Forwards unknown attributes to what it wraps, as FSDP and torch's checkpoint wrapper do."""

    name = "inner"

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._modules[self.name] = inner

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules[self.name], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.get_submodule(self.name)(*args, **kwargs)


class LikeFSDP1(Wrapper):
    name = "_fsdp_wrapped_module"


def compiled_part(part: nn.Module) -> Any:
    torch.compiler.reset()
    return torch.compile(part, backend="eager")


@pytest.mark.parametrize(
    ("path", "wrap"),
    [*product(["bert.encoder", "bert"], [compiled_part, LikeFSDP1, Wrapper]), ("bert.encoder", checkpoint_wrapper)],
)
@pytest.mark.parametrize("when", others_exhaustive(["after a call", "after", "before"], lambda w: w != "after"))
def test_a_part_that_is_wrapped(path: str, wrap: Any, when: str) -> None:
    """Eager attention adds the mask to the scores, so that it must not get a mask of another kind."""
    reference, model = tiny_bert(), tiny_bert()
    if when != "before":
        unpad(model, 8)
    elif wrap is checkpoint_wrapper:
        pytest.skip("its module is not the encoder's class")
    if when == "after a call":
        compared(reference, model, lambda module: module(**batch([5, 12, 9])).loss)
    model.set_submodule(path, wrap(model.get_submodule(path)))
    if when == "before":
        unpad(model, 8)
    for lengths in ([5, 12, 9], [7, 3, 12]):
        ran = compared(reference, model, lambda module: module(**batch(lengths)).loss)  # noqa: B023
        # of other wrappers it is unknown how they call the encoder
        known = when == "before" or wrap in (compiled_part, LikeFSDP1) or path == "bert"
        if wrap is not compiled_part:  # whose code reports nothing
            assert ran == ("packed" if known else "padded")


@pytest.mark.parametrize("wrap", others_exhaustive([compiled_part, Wrapper], lambda wrap: wrap is Wrapper))
@pytest.mark.parametrize("called_before", [False, True])
def test_a_head_on_labelled_tokens_whose_base_is_wrapped_later(wrap: Any, called_before: bool) -> None:
    """10 labels are rounded up to 64, which is also the number of slots: all shapes would fit, with wrong values."""
    reference = tiny_model("bert", "mlm").train()
    model = copy.deepcopy(reference)
    unpad(model, 64, "labelled")
    (inputs,) = fit_batches(model, [batch([16, 7, 3, 12], 16)])
    labels = torch.full((4, 16), -100)
    labels.view(-1)[[1, 3, 5, 8, 17, 20, 33, 34, 50, 55]] = torch.arange(10) + 3
    inputs["labels"] = labels
    if called_before:
        compared(reference, model, lambda module: module(**inputs).loss)
    model.bert = wrap(model.bert)
    for _ in range(2):
        compared(reference, model, lambda module: module(**inputs).loss)

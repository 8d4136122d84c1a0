"""Subclasses, wrappers and Trainers of one's own around an unpadded encoder compute what they compute without it."""

from __future__ import annotations

import copy
import pickle
from abc import ABC
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from composer.models import ComposerModel
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertForPreTraining,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    BertPreTrainedModel,
    DynamicCache,
)

from composer_speedups import Unpadding
from composer_speedups.algorithms.fused_layers.fusing import fuse
from composer_speedups.algorithms.unpadding.encoder_swap import restore_encoders, unpad
from composer_speedups.core.errors import TechniqueError
from composer_speedups.core.stock import built_on_meta
from composer_speedups.packing.encoder import unpadded_encoders
from tests.helpers.common import Batch, Recorder, batch, data_spec, make_trainer, tiny_bert, tiny_config, without_labels
from tests.helpers.exhaustive import others_exhaustive
from tests.helpers.models import FUSED, Family, fit_batches, tiny_model
from tests.outside.test_calls_by_other_ways import compared, labelled_padding, ran
from tests.reference.loop import counted, gradients
from tests.reference.tolerance import assert_near

pytestmark = pytest.mark.outside


@pytest.fixture(autouse=True)
def _own_accelerator() -> Iterator[None]:
    """accelerate keeps one state per process, which an earlier test's Trainer may have set."""
    state = pytest.importorskip("accelerate.state")
    state.AcceleratorState._reset_state(True)
    yield
    state.AcceleratorState._reset_state(True)


def config(**settings: Any) -> Any:
    return tiny_config(initializer_range=0.2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **settings)


def of(kind: Any, **settings: Any) -> Any:
    torch.manual_seed(0)
    return kind._from_config(config(**settings), attn_implementation="eager")


def pair(model: Any, **settings: Any) -> tuple[Any, Any]:
    changed = copy.deepcopy(model)
    unpad(changed, 8, **settings)
    return model, changed


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.view(-1, 2), labels.view(-1))


def tokens(*, padding: bool = False) -> Batch:
    inputs = labelled_padding(tiny_model("bert", "tokens"))
    if not padding:
        inputs["labels"] = inputs["labels"].masked_fill(inputs["attention_mask"] == 0, -100)
    return inputs


# The arguments of a forward of one's own.


class AnyArguments(BertForTokenClassification):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        ids, mask, labels = args
        return token_loss(self.classifier(self.bert(ids, mask)[0]), labels)


class PositionalOnly(BertForTokenClassification):
    def forward(self, input_ids: Tensor, /, attention_mask: Any = None, tags: Any = None) -> Any:
        return super().forward(input_ids, attention_mask, labels=tags).loss


class TheRest(BertForTokenClassification):
    def forward(self, input_ids: Tensor, *rest: Any) -> Any:
        mask, labels = rest
        return super().forward(input_ids, mask, labels=labels).loss


@pytest.mark.parametrize("kind", [AnyArguments, PositionalOnly, TheRest])
def test_positional_arguments_stay_positional(kind: Any) -> None:
    reference, model = pair(of(kind))
    inputs = tokens()
    given = [inputs[name] for name in ("input_ids", "attention_mask", "labels")]
    for _ in range(3):
        compared(reference, model, lambda module: module(*given))
    assert ran(model) == ["unpadded"]


def test_an_argument_that_is_given_twice_is_an_error() -> None:
    model = tiny_bert()
    unpad(model)
    ids = batch([3, 5])["input_ids"]
    with pytest.raises(TypeError, match="multiple values for argument 'input_ids'"):
        model(ids, input_ids=ids)


# Several heads of one encoder.


@pytest.mark.parametrize("order", [["tokens", "rows"], ["rows", "tokens"]])
def test_two_heads_of_one_encoder(order: list[str]) -> None:
    reference = nn.ModuleDict({"tokens": tiny_model("bert", "tokens"), "rows": tiny_bert()})
    reference["tokens"].bert = reference["rows"].bert
    model = copy.deepcopy(reference)
    for name in order:
        unpad(model[name], 8)
    for name, inputs in (("tokens", tokens(padding=True)), ("tokens", tokens()), ("rows", batch([5, 12, 9]))):
        compared(reference[name], model[name], lambda module, inputs=inputs: module(**inputs).loss)  # type: ignore[misc]
    assert ran(model) == ["unpadded"]


class MeanOfAll(BertForSequenceClassification):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.bert(input_ids, attention_mask)[0].mean(1).square().sum()


def test_a_later_head_is_compared_too() -> None:
    first, second = tiny_bert(), of(MeanOfAll)
    second.bert = first.bert
    unpad(first, 8)
    unpad(second, 8)
    inputs = batch([5, 12, 9])
    with pytest.raises(ValueError, match="the model is restored"):
        second(inputs["input_ids"], inputs["attention_mask"])


# Another model that is called inside a forward of one's own.


@pytest.mark.filterwarnings("ignore:batches stay padded")
def test_a_model_called_inside_another_has_its_own_call() -> None:
    """The student has labels; its teacher gets none, and its logits are read at padding."""
    reference, model = pair(tiny_model("bert", "tokens").train())
    inputs = tokens()
    teachers = dict(zip((reference, model), pair(tiny_model("bert", "tokens")), strict=True))
    for student, teacher in teachers.items():

        def add(module: Any, _: Any, logits: Tensor, teacher: Any = teacher) -> Tensor:
            return logits + teacher(**without_labels(inputs)).logits.mean(1, True) if module.training else logits

        student.classifier.register_forward_hook(add)
    for _ in range(2):
        for teacher in teachers.values():
            teacher.zero_grad()
        compared(reference, model, lambda module: module(**inputs).loss)
        assert_near(gradients(teachers[model]), gradients(teachers[reference]))
    assert (ran(model), ran(teachers[model])) == (["unpadded"], ["padded"])


def test_cached_keys_without_a_mask() -> None:
    reference, model = pair(tiny_bert().bert.eval())
    ids = batch([5, 12, 9])["input_ids"]
    results = []
    for module in (model, reference):
        cache = DynamicCache(config=module.config)
        torch.manual_seed(0)
        for layer in range(2):
            cache.update(torch.randn(3, 2, 2, 16), torch.randn(3, 2, 2, 16), layer)
        with torch.no_grad():
            results.append(module(ids, past_key_values=cache).last_hidden_state)
    assert_near([results[0]], [results[1]])
    assert ran(model) == ["padded"]


# What a head reads.


class BertForBoth(BertPreTrainedModel):
    """Its loss reads padding in training only, which no comparison in eval mode can see."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert, self.head = BertModel(config), nn.Linear(32, 2)
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        hidden = self.bert(input_ids, attention_mask)[0]
        loss = nn.functional.cross_entropy(self.head(hidden[:, 0]), labels)
        return loss + hidden.square().mean() if self.training else loss


@pytest.mark.filterwarnings("ignore:batches stay padded")
def test_a_head_of_ones_own_is_observed_whatever_its_name() -> None:
    reference, model = pair(of(BertForBoth).train())
    for _ in range(2):
        compared(reference, model, lambda module: module(**batch([5, 12, 9])))
    assert ran(model) == ["padded"]


@pytest.mark.exhaustive
def test_a_head_of_ones_own_with_a_query_key_mask() -> None:
    """Which positions are padding is not known, so the gradient cannot be observed."""
    reference, model = pair(of(BertForBoth).train())
    causal = torch.ones(6, 6).tril().bool().expand(3, 1, 6, 6)
    compared(reference, model, lambda module: module(**{**batch([6, 6, 6], 6), "attention_mask": causal}))
    assert ran(model) == ["padded"]


@pytest.mark.parametrize("head", ["classification", "pretraining", "as many labels as slots", "regression"])
def test_a_row_without_tokens_stays_padded_if_its_first_slot_is_read(head: str) -> None:
    inputs = without_labels(batch([5, 0, 9], 12))
    if head == "classification":
        model: Any = tiny_bert()
        inputs["labels"] = torch.tensor([0, 1, 1])
    elif head == "pretraining":
        model = of(BertForPreTraining)
        inputs["labels"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        inputs["next_sentence_label"] = torch.tensor([0, 1, 0])
    elif head == "regression":
        model, inputs["labels"] = of(BertForSequenceClassification, num_labels=1), torch.tensor([1.0, -100.0, 2.0])
    else:
        model = of(BertForSequenceClassification, num_labels=12, problem_type="multi_label_classification")
        inputs["labels"] = torch.arange(36.0).view(3, 12) % 2
    reference, model = pair(model)
    compared(reference, model, lambda module: module(**inputs).loss)
    assert ran(model) == ["padded"]


def test_labels_in_bfloat16() -> None:
    for labels in (torch.ones(3), torch.ones(3, 2)):
        kind = {"num_labels": 1} if labels.ndim == 1 else {"problem_type": "multi_label_classification"}
        reference, model = pair(of(BertForSequenceClassification, **kind).bfloat16())
        inputs = {**batch([5, 12, 9]), "labels": labels.bfloat16()}
        assert_near([model(**inputs).loss.float()], [reference(**inputs).loss.float()], torch.bfloat16)


def test_a_gradient_that_overflows_is_no_reading_of_padding() -> None:
    _, model = pair(tiny_bert().bert)
    inputs = without_labels(batch([5, 12, 9]))
    mask = inputs["attention_mask"][..., None]
    for scale in (float("inf"), 1.0, float("inf")):  # fp16 overflows at first, and now and then
        ((model(**inputs).last_hidden_state * mask).sum() * scale).backward()
    assert ran(model) == ["unpadded"]


# The caller's code around a model.


def recomputed(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    return checkpoint(lambda i, m: model(i, m).last_hidden_state, ids, mask, use_reentrant=False)  # type: ignore[no-any-return]


def test_a_whole_model_that_is_recomputed() -> None:
    reference, model = pair(tiny_bert().bert)
    inputs = batch([5, 12, 9])
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    for expected in ("padded", "unpadded"):
        compared(reference, model, lambda module: (recomputed(module, ids, mask) * mask[..., None]).square().mean())
        assert ran(model) == [expected]


def test_results_of_a_frozen_model_are_plain_tensors() -> None:
    inputs = without_labels(batch([5, 12, 9]))
    for frozen, name in ((tiny_bert().bert, "last_hidden_state"), (tiny_model("bert", "tokens"), "logits")):
        reference, model = pair(frozen.requires_grad_(False))
        for _ in range(2):
            output, expected = (module(**inputs)[name] for module in (model, reference))
            assert not output.requires_grad
            assert_near([torch.from_numpy(output.numpy())], [expected])


def test_hidden_states_can_be_changed_in_place() -> None:
    reference, model = pair(tiny_bert().bert)
    inputs = without_labels(batch([5, 12, 9]))

    def loss(module: Any) -> Tensor:
        hidden = module(**inputs).last_hidden_state
        hidden[inputs["attention_mask"] == 0] = -1e9  # as max pooling does
        return hidden.max(1).values.square().sum()  # type: ignore[no-any-return]

    for expected in ("padded", "unpadded"):
        compared(reference, model, loss)
        assert ran(model) == [expected]


class Counts(nn.Module):
    """Keeps a running mean and a number of calls, both in place and by assignment."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = tiny_bert().bert
        self.calls: Tensor
        self.mean: Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(32))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Any = None) -> Tensor:
        pooled = self.bert(input_ids, attention_mask)[1]
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * pooled.detach().mean(0)
        return (pooled - self.mean).square().sum() * self.calls  # type: ignore[no-any-return]


def test_a_comparison_leaves_buffers_as_they_were() -> None:
    reference, model = pair(Counts())
    for _ in range(3):
        compared(reference, model, lambda module: module(**batch([5, 12, 9])))
    assert_near([model.calls, model.mean], [reference.calls, reference.mean])


class AbstractLast(nn.Module, ABC):
    def __init__(self) -> None:
        super().__init__()
        self.bert = tiny_bert().bert

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Any = None) -> Tensor:
        return self.bert(input_ids, attention_mask)[1].square().sum()  # type: ignore[no-any-return]


class AbstractFirst(ABC, nn.Module):  # as the modules of sentence-transformers
    __init__, forward = AbstractLast.__init__, AbstractLast.forward  # type: ignore[assignment]


class AbstractModel(BertForSequenceClassification, ABC):
    pass


def test_abstract_classes() -> None:
    inputs = batch([5, 12, 9])
    own = of(AbstractModel)
    for made, loss in (
        (_with_bert(AbstractLast), lambda module: module(**inputs)),
        (_with_bert(AbstractFirst), lambda module: module(**inputs)),
        (own, lambda module: module(**inputs).loss),
    ):
        reference, model = pair(made)
        loaded = pickle.loads(pickle.dumps(model))
        for module in (model, loaded):
            compared(reference, module, loss)
            compared(reference, module, loss)
            assert ran(module) == ["unpadded"]
        assert restore_encoders(model)
        assert type(model) is type(reference)


def _with_bert(kind: Any) -> Any:
    made: Any = kind.__new__(kind)
    nn.Module.__init__(made)
    made.bert = tiny_bert().bert
    return made


def test_building_a_reference_does_not_change_other_threads() -> None:
    """transformers' ``no_init_weights`` would: a layer built meanwhile, or after two at once, held garbage."""
    functions = dict(vars(nn.init))
    seen: list[Any] = []

    def build() -> nn.Module:
        seen.append(dict(vars(nn.init)))
        return nn.Identity()

    built_on_meta(build)
    assert seen == [functions]


# accelerate, and Composer's Trainer.


@pytest.mark.parametrize("order", ["apply, prepare", "prepare, apply"])
@pytest.mark.parametrize("own", [False, True])
def test_mixed_precision_of_accelerate(order: str, own: bool) -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    reference, model = of(AbstractModel) if own else tiny_bert(), of(AbstractModel) if own else tiny_bert()
    accelerator.prepare_model(reference)
    for step in order.split(", "):
        unpad(model, 8) if step == "apply" else accelerator.prepare_model(model)
    inputs = batch([5, 12, 9])
    for _ in range(2):
        output, expected = model(**inputs), reference(**inputs)
        output.loss.backward()
        assert_near([output.logits], [expected.logits], torch.bfloat16)
    assert ran(model) == ["unpadded"]
    restore_encoders(model)
    assert_near([model(**inputs).logits], [expected.logits], torch.bfloat16)


def test_a_model_that_accelerate_gives_back_still_sees_its_labels() -> None:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    reference, model = pair(tiny_model("bert", "tokens"))
    model = accelerator.unwrap_model(accelerator.prepare_model(model), keep_fp32_wrapper=False)
    inputs = tokens(padding=True)
    with torch.no_grad():
        assert_near([model(**inputs).loss], [reference(**inputs).loss])
    assert ran(model) == ["padded"]


class Tagger(ComposerModel):
    """Its labels have another name, so only its loss knows them."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.model, self.reads = tiny_model("bert", "tokens"), reads

    def forward(self, batch: Batch) -> Any:
        return self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits

    def loss(self, outputs: Any, batch: Batch, *args: Any, **kwargs: Any) -> Any:
        loss = token_loss(outputs, batch["tags"])
        return loss + outputs.square().mean() if self.reads == "in training" and self.training else loss


@pytest.mark.parametrize("reads", ["never", "in a later batch", "in training"])
def test_a_composer_model_that_reads_padding_after_its_comparison(reads: str) -> None:
    batches = [batch([9, 4, 12], seed=seed) for seed in range(3)]
    for i, inputs in enumerate(batches):
        tags = inputs["input_ids"] % 2
        every = i and reads == "in a later batch"
        inputs["tags"] = tags if every else tags.masked_fill(inputs["attention_mask"] == 0, -100)

    def losses(algorithms: list[Any]) -> list[float]:
        recorder = Recorder()
        trainer = make_trainer(algorithms, model=Tagger(reads), batches=batches, callbacks=[recorder])
        try:
            trainer.fit()
        finally:
            trainer.close()
        return recorder.losses

    if reads == "never":
        assert_near(losses([Unpadding(8)]), losses([]))
        return
    with pytest.raises(RuntimeError, match="the loss reads outputs at padding positions"):
        losses([Unpadding(8)])


def test_a_comparison_in_an_evaluation_is_repeated_with_the_loss() -> None:
    """Evaluation compares only outputs at real tokens; the loss of training reads padding."""
    batches = [batch([9, 4, 12], seed=seed) for seed in range(2)]
    for inputs in batches:
        inputs["tags"] = inputs["input_ids"] % 2
    trainer = make_trainer([Unpadding(8)], model=Tagger("in every batch"), batches=batches)
    trainer.predict(data_spec(batches))
    with pytest.raises(TechniqueError, match="its result differs from the untouched model's"):
        trainer.fit()
    trainer.close()


# Rows with holes.


@pytest.mark.parametrize("width", [5, 6, 9])
@pytest.mark.parametrize("family", ["modernbert", "deberta_v2"])
def test_a_hole_that_changes_distances_keeps_a_batch_padded(family: Family, width: int) -> None:
    """ModernBERT's window is 4 tokens on either side: in rows of up to 5, every token sees every other."""
    reference, model = pair(tiny_model(family))
    (inputs,) = fit_batches(reference, [batch([width, width - 1])])
    inputs["attention_mask"][0, 2:-2] = 0
    compared(reference, model, lambda module: module(**inputs).loss)
    assert ran(model) == ["unpadded" if family == "modernbert" and width == 5 else "padded"]


# torch.compile.


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "fused", "planned"),
    list(product(["bert", "modernbert", "deberta_v2", "mpnet"], [False, True], [False, True])),
)
def test_a_compiled_model_with_and_without_a_plan(family: Family, fused: bool, planned: bool) -> None:
    if fused and family not in FUSED:
        pytest.skip(f"fused_layers does not support {family}")
    head: Any = "classification" if planned else "tokens"
    reference, model = pair(tiny_model(family, head, layers=1))
    if fused:
        fuse(model)
    torch.compiler.reset()
    call: Callable[..., Any] = torch.compile(model, backend="eager")
    for lengths in ([5, 12, 9], [7, 3, 12]):
        inputs = labelled_padding(reference) if head == "tokens" else batch(lengths)
        (inputs,) = [inputs] if head == "tokens" else fit_batches(reference, [inputs])
        given = [inputs]
        if head == "tokens":
            given.append({**inputs, "labels": inputs["labels"].masked_fill(inputs["attention_mask"] == 0, -100)})
        for example in given:

            def loss(called: Any, example: Batch = example) -> Tensor:
                if called is model and planned:
                    counted(model, example["attention_mask"])
                return (call if called is model else called)(**example).loss  # type: ignore[no-any-return]

            compared(reference, model, loss)
    assert ran(model) == ["unpadded"]
    assert len(unpadded_encoders(model)) == 1


# A wrapper at the name of a part of the model, after the change.


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
    [
        *product(["bert.encoder", "bert"], [compiled_part, LikeFSDP1, Wrapper]),
        ("bert.encoder", checkpoint_wrapper),
    ],
)
@pytest.mark.parametrize("called_before", others_exhaustive([False, True], bool))
def test_a_part_that_is_wrapped_later(path: str, wrap: Any, called_before: bool) -> None:
    """Eager attention adds the mask to the scores, so that it must not get a mask of another kind."""
    reference, model = pair(tiny_bert())
    inputs = batch([5, 12, 9])
    if called_before:
        compared(reference, model, lambda module: module(**inputs).loss)
    model.set_submodule(path, wrap(model.get_submodule(path)))
    for lengths in ([5, 12, 9], [7, 3, 12]):
        inputs = batch(lengths)
        for module in (model, reference):
            module.zero_grad()
            module(**inputs).loss.backward()
        assert_near(parameter_gradients(model), parameter_gradients(reference))
        assert_near([model(**inputs).logits], [reference(**inputs).logits])
        known = (
            wrap in (compiled_part, LikeFSDP1) or path == "bert"
        )  # of other wrappers it is unknown how they call the encoder
        assert ran(model) == ["unpadded" if known else "padded"]


@pytest.mark.parametrize("wrap", others_exhaustive([compiled_part, LikeFSDP1, Wrapper], lambda wrap: wrap is LikeFSDP1))
@pytest.mark.parametrize("path", ["bert.encoder", "bert"])
def test_a_part_that_was_wrapped_before(wrap: Any, path: str) -> None:
    reference, model = tiny_bert(), tiny_bert()
    model.set_submodule(path, wrap(model.get_submodule(path)))
    unpad(model, 8)
    for lengths in ([5, 12, 9], [7, 3, 12]):
        for module in (model, reference):
            module.zero_grad()
            module(**batch(lengths)).loss.backward()
        assert_near(parameter_gradients(model), parameter_gradients(reference))
        assert ran(model) == ["unpadded"]


def parameter_gradients(model: Any) -> list[Tensor]:
    """Gradients in the order of parameters, whose names a wrapper changes."""
    return [p.grad for p in model.parameters() if p.grad is not None]


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
        for module in (model, reference):
            module.zero_grad()
            loss = module(**inputs).loss
            loss.backward()
        assert_near([model(**inputs).loss], [loss])
        assert_near(parameter_gradients(model), parameter_gradients(reference))

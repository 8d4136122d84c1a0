"""Every technique on every family: outputs and gradients match the untouched model, or the technique is refused.

The models have two layers and no dropout. tests/helpers/refusals.py lists the expected refusals, and test_variants.py
has models with other settings than these.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from composer_speedups import (
    FastLayerNorm,
    FusedLayers,
    GradientCheckpointing,
    LayerFreezing,
    LoRA,
    SDPAAttention,
    SparseUpcycling,
    TorchCompile,
    Unpadding,
)
from composer_speedups.algorithms.fast_layernorm.modules import LowPrecisionLayerNorm
from composer_speedups.algorithms.lora.modules import ADAPTER, adapted_layers, trained_copies
from composer_speedups.algorithms.sparse_upcycling.modules import SparseFeedForward
from composer_speedups.algorithms.torch_compile.modules import has_compiled_code
from composer_speedups.core.compile_counts import compile_counts
from composer_speedups.core.engaging import engage
from composer_speedups.core.run import Run
from composer_speedups.families.blocks import repeated_blocks
from composer_speedups.families.family import family_named
from composer_speedups.kernels.common import counting
from tests.helpers.common import VOCABULARY, Batch
from tests.helpers.exhaustive import DEFAULT_FAMILIES, others_exhaustive
from tests.helpers.models import ENCODERS, EVERY, Family, tiny_model
from tests.helpers.refusals import (
    FAILING,
    HEADS,
    INPUTS,
    MISSING,
    REFUSALS,
    TECHNIQUES,
    UNDEFINED,
    left_padded,
    refusal_of,
)
from tests.helpers.unpadded import way
from tests.reference.loop import gradients
from tests.reference.tolerance import assert_near

pytestmark = pytest.mark.pins
ROWS, WIDTH, CHOICES = 4, 12, 3
LENGTHS = torch.tensor([[7], [12], [1], [9]])
every_combination = pytest.mark.parametrize(
    ("family", "technique"),
    others_exhaustive(  # compiling takes seconds
        product((*EVERY, *ENCODERS), TECHNIQUES),
        lambda pair: pair[0] in DEFAULT_FAMILIES and pair[1] != "torch_compile",
    ),
)
TYPED = {family for family in EVERY if family not in ("distilbert", "mpnet", "modernbert", "esm", "eurobert")}


def heads_with_every_input(family: Family, technique: str) -> tuple[str, ...]:
    heads = ("tokens", "pooling") if family in ENCODERS else ("mlm", "classification")
    return heads if technique != "torch_compile" else heads[:1]  # compiling takes seconds


def accepts(family: Family, head: str, input_kind: str) -> bool:
    if head == "pooling" and input_kind in ("no mask", "4-D mask"):  # it reads the mask
        return False
    return not (
        (input_kind == "token types" and family not in TYPED) or (input_kind == "position ids" and family in ENCODERS)
    )


class MeanPooled(nn.Module):
    """A custom mean-pooling head on a bare encoder."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder, self.top = encoder, nn.Linear(encoder.config.hidden_size, 2)

    def forward(self, labels: Tensor | None = None, **inputs: Any) -> dict[str, Any]:
        hidden = self.encoder(**inputs).last_hidden_state
        weights = inputs["attention_mask"][..., None].float()
        logits = self.top((hidden * weights).sum(1) / weights.sum(1).clamp(min=1))
        return {"logits": logits, "loss": None if labels is None else nn.functional.cross_entropy(logits, labels)}


@cache
def untouched(family: Family, head: str) -> Any:
    if head != "pooling":
        return tiny_model(family, head).train()
    torch.manual_seed(0)
    return MeanPooled(tiny_model(family, "tokens").base_model).train()


def draw(family: Family, head: str, input_kind: str) -> Batch:
    """Return a batch of 4 rows of width 12, right-padded unless ``input_kind`` says otherwise."""
    generator = torch.Generator().manual_seed(INPUTS.index(input_kind))
    model = untouched(family, head)
    config = (model.encoder if head == "pooling" else model).config
    mask = (torch.arange(WIDTH) < LENGTHS).long()
    if input_kind == "left padding":
        mask = mask.flip(-1)
    elif input_kind == "holes":
        mask = (torch.rand(ROWS, WIDTH, generator=generator) < 0.6).long()
        mask[:, 0] = 1
    elif input_kind in ("no padding", "no mask"):
        mask[:] = 1
    elif input_kind == "a row of padding":
        mask[2] = 0
    ids = torch.randint(2, VOCABULARY, mask.shape, generator=generator).masked_fill(mask == 0, config.pad_token_id)
    inputs: Batch = {"input_ids": ids, "attention_mask": mask}
    if input_kind == "token types":
        inputs["token_type_ids"] = torch.randint(0, 2, mask.shape, generator=generator)
    elif input_kind == "position ids":
        inputs["position_ids"] = torch.randint(2, 80, mask.shape, generator=generator)
    elif input_kind == "embeddings":
        del inputs["input_ids"]
        width = config.embedding_size if family in ("albert", "electra") else 32
        inputs["inputs_embeds"] = torch.randn(ROWS, WIDTH, width, generator=generator)
    elif input_kind == "4-D mask":
        added = torch.zeros(ROWS, 1, WIDTH, WIDTH)
        inputs["attention_mask"] = added.masked_fill(mask[:, None, None, :] == 0, torch.finfo(added.dtype).min)
    elif input_kind == "no mask":
        del inputs["attention_mask"]
    elif input_kind == "hidden states and attentions":
        inputs |= {"output_hidden_states": True, "output_attentions": True}  # type: ignore[dict-item]
    if head in ("mlm", "tokens"):
        labelled = (mask == 1) & ((torch.arange(WIDTH) % 3 == 0) | (head == "tokens"))
        inputs["labels"] = (ids if head == "mlm" else ids % 2).masked_fill(~labelled, -100)
    elif head == "answering":
        real = (mask * torch.arange(1, WIDTH + 1)).argmax(-1)  # position of the last real token
        inputs |= {"start_positions": mask.argmax(-1), "end_positions": real}
    else:
        inputs["labels"] = torch.randint(0, 2, (ROWS,), generator=generator).masked_fill(mask.sum(-1) == 0, -100)
    if head == "choice":
        inputs |= {name: torch.stack([inputs[name].roll(i, 0) for i in range(CHOICES)], 1) for name in ids_and_mask}
    return inputs


ids_and_mask = ("input_ids", "attention_mask")


def select_real(values: Tensor, mask: Tensor) -> Tensor:
    """Return the values of real tokens, or of rows with one. Shapes: (B, S, …), (B, heads, S, S) or (B, …)."""
    if values.ndim == 4:
        values = values.transpose(1, 2)
    return values[mask] if values.shape[:2] == mask.shape else values[mask.any(-1)]


def outcome(model: Any, inputs: Batch, input_kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Run forward and backward; return the outputs of real tokens or rows, and the gradients."""
    model.zero_grad()
    model.train(input_kind != "eval mode")
    with torch.set_grad_enabled(input_kind != "eval mode"):
        output = model(**inputs)
    mask = inputs.get("attention_mask", torch.ones(ROWS, WIDTH))
    mask = mask[:, 0, 0] == 0 if mask.is_floating_point() and mask.ndim == 4 else mask.bool()
    if mask.ndim == 3:  # multiple choice: (B, choices, S)
        mask = mask.any(1)
    outputs = {"loss": output["loss"].detach()}
    for name in ("logits", "start_logits", "end_logits"):
        if output.get(name) is not None:
            outputs[name] = select_real(output[name].detach(), mask)
    for name in ("hidden_states", "attentions"):
        for i, state in enumerate(output.get(name) or ()):
            if state is not None:
                outputs[f"{name}.{i}"] = select_real(state.detach(), mask)
    if input_kind != "eval mode":
        output["loss"].backward()
    return outputs, gradients(model)


@cache
def expected_of(family: Family, head: str, input_kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return outcome(
        copy.deepcopy(untouched(family, head)), draw(family, head, input_kind), input_kind
    )  # transformers leaves hooks


TECHNIQUE: dict[str, Callable[[], list[Any]]] = {
    "unpadding": lambda: [Unpadding(8, check="never")],
    "fused_layers": lambda: [Unpadding(8, check="never"), FusedLayers(check="never")],
    "sdpa_attention": lambda: [SDPAAttention(check="never")],
    "fast_layernorm": lambda: [FastLayerNorm()],
    "gradient_checkpointing": lambda: [GradientCheckpointing()],
    "torch_compile": lambda: [TorchCompile(scope="blocks", backend="eager", dynamic=True)],
    "layer_freezing": lambda: [LayerFreezing(layers=1)],
    "lora": lambda: [LoRA()],
    "sparse_upcycling": lambda: [SparseUpcycling(experts=3, every=1, load_balancing=0.0)],
}


class Operators(TorchDispatchMode):
    """Counts aten operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func.overloadpacket.__name__)] += 1
        return func(*args, **(kwargs or {}))


class Watch:
    """Checks that a technique took effect in a forward and backward pass."""

    def __init__(self, technique: str, model: Any) -> None:
        self.technique, self.model = technique, model
        self.compiled, self.ran = compile_counts(), Counter[str]()
        self.operators = Operators()
        self.differentiable: list[bool] = []  # for each call of the first block
        if technique == "layer_freezing":
            self.hook = next(iter(repeated_blocks(model).values())).register_forward_hook(self._see)

    def _see(self, block: Any, args: Any, output: Any) -> None:
        self.differentiable.append((output if isinstance(output, Tensor) else output[0]).requires_grad)

    def _count(self, kind: Any) -> int:
        return sum(isinstance(module, kind) for module in self.model.modules())

    def check(self, family: Family, head: str, input_kind: str, padded: bool | None = None) -> None:
        padded = input_kind in left_padded(family, head) if padded is None else padded
        if self.technique in ("unpadding", "fused_layers"):
            assert way(self.ran) == ("padded" if padded else "packed"), input_kind
        if self.technique == "fused_layers":
            first = head == "classification" and family != "albert"
            names = ["stock_layer"] * 2 if padded else ["torch_layer", "first_tokens" if first else "torch_layer"]
            assert [self.ran[name] for name in {*names}] == [names.count(name) for name in {*names}], input_kind
        elif self.technique == "sdpa_attention":
            # The math kernel is decomposed before dispatch; no other attention uses this softmax.
            ran = [name for name in self.operators.counts if "scaled_dot_product" in name or name == "_safe_softmax"]
            assert ran
        elif self.technique == "fast_layernorm":
            plain = sum(type(module) is nn.LayerNorm for module in untouched(family, head).modules())
            assert self._count(LowPrecisionLayerNorm) == plain > 0
        elif self.technique == "gradient_checkpointing":
            assert self.ran["recomputed_block"] == (0 if input_kind == "eval mode" else 2)
        elif self.technique == "torch_compile":
            since = compile_counts().since(self.compiled)
            assert since.failed == 0 or input_kind == "hidden states and attentions", (
                "compilation failed; only transformers' output recorders may prevent it"
            )
            assert all(map(has_compiled_code, repeated_blocks(self.model).values())), (
                "a block was compiled neither now nor by an earlier test"
            )
        elif self.technique == "layer_freezing":
            self.hook.remove()
            assert self.differentiable == [False], "the first block has a backward pass"
        elif self.technique == "lora":
            assert adapted_layers(self.model)
        elif self.technique == "sparse_upcycling":
            sparse = [module for module in self.model.modules() if isinstance(module, SparseFeedForward)]
            assert len(sparse) == 2
            assert all(sum(self.ran[f"{layer.name} expert {i}"] for i in range(3)) >= 2 for layer in sparse)


def as_dense(model: Any, family: Family, grads: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients under the names of the dense model, with the experts of a layer summed up.

    A token's routing weights add up to one, so the gradients of identical experts add up to the dense gradient.
    """
    up, _, down = family_named(family).feed_forward  # type: ignore[union-attr, misc]
    for path, sparse in model.named_modules():
        if isinstance(sparse, SparseFeedForward):
            router = grads.pop(f"{path}.router.weight")
            assert router.abs().max() < 1e-4, "identical experts give the router no gradient"
            names = {"up": path, "down": path.removesuffix(up) + down}
            for part in ("up.weight", "up.bias", "down.weight", "down.bias"):
                name, _, kind = part.partition(".")
                parts = [grads.pop(f"{path}.experts.{i}.{part}") for i in range(len(sparse.experts))]
                grads[f"{names[name]}.{kind}"] = torch.stack(parts).sum(0)
    return grads


def adapter_gradients(model: Any, expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """Compute the expected gradients of zero-initialized adapters and copied heads from the dense model's."""
    made: dict[str, Tensor] = {}
    for name, layer in adapted_layers(model).items():
        if name.endswith("contact_head.regression"):  # ESM's, which no loss reads
            continue
        first = layer.lora_A[ADAPTER].weight.detach()
        made[f"{name}.lora_A.{ADAPTER}.weight"] = torch.zeros_like(first)
        made[f"{name}.lora_B.{ADAPTER}.weight"] = layer.scaling[ADAPTER] * expected[f"{name}.weight"] @ first.T
    copied = {name for name, _ in trained_copies(model).items()}
    for name, gradient in expected.items():
        for path in copied:
            if name.startswith(f"{path}."):
                made[name.replace(path, f"{path}.modules_to_save.{ADAPTER}", 1)] = gradient
    if isinstance(model, MeanPooled):  # its head is outside the model that gets adapters
        made |= {name: gradient for name, gradient in expected.items() if name.startswith("top.")}
    return made


def check(model: Any, technique: str, family: Family, head: str, input_kind: str) -> None:
    inputs, watch = draw(family, head, input_kind), Watch(technique, model)
    with counting() as watch.ran, watch.operators if technique == "sdpa_attention" else nullcontext():
        values, grads = outcome(model, inputs, input_kind)
    expected, wanted = expected_of(family, head, input_kind)
    if technique == "sdpa_attention":  # transformers returns no attentions with SDPA
        expected = {name: value for name, value in expected.items() if not name.startswith("attentions")}
    what = f"{technique} on {family} with {head} and {input_kind}"
    assert_near(values, expected, what=what)
    if input_kind != "eval mode":
        grads = as_dense(model, family, grads) if technique == "sparse_upcycling" else grads
        wanted = adapter_gradients(model, wanted) if technique == "lora" else wanted
        if technique == "layer_freezing":
            trained = {name for name, p in model.named_parameters() if p.requires_grad}
            assert len(wanted) > len(trained)
            wanted = {name: gradient for name, gradient in wanted.items() if name in trained}
        assert_near(grads, wanted, what=f"gradients of {what}")
    watch.check(family, head, input_kind)


def structure(model: nn.Module) -> list[Any]:
    return [(name, type(module), set(vars(module))) for name, module in model.named_modules()]


def applied(technique: str, family: Family, head: str) -> Any:
    """Return a copy of the untouched model with the technique, or None after checking that it is refused."""
    model = copy.deepcopy(untouched(family, head))
    before = structure(model)
    run = Run(device=torch.device("cpu"), model=model)
    if refused := refusal_of(technique, family, head):
        with pytest.raises(ValueError, match=refused.error):
            engage(run, TECHNIQUE[technique]())
        assert structure(model) == before
        return None
    engage(run, TECHNIQUE[technique]())
    if technique in ("unpadding", "fused_layers"):
        changed = structure(model)
        run.undo.close()
        assert structure(model) == before != changed
        engage(Run(device=torch.device("cpu"), model=model), TECHNIQUE[technique]())
    return model


@every_combination
def test_every_input_matches_the_untouched_model(family: Family, technique: str) -> None:
    for head in heads_with_every_input(family, technique):
        torch.compiler.reset()  # dynamo limits the recompilations of a class
        model = applied(technique, family, head)
        if model is None:
            continue
        for input_kind in INPUTS:
            if not accepts(family, head, input_kind) or (technique, family, head, input_kind) in UNDEFINED:
                continue
            if (family, input_kind) in FAILING:
                with pytest.raises(RuntimeError, match="must match the size"):
                    untouched(family, head)(**draw(family, head, input_kind))
                with pytest.raises((RuntimeError, ValueError)):
                    model(**draw(family, head, input_kind))
                continue
            refused = refusal_of(technique, family, head, input_kind)
            if refused is None:
                check(model, technique, family, head, input_kind)
            else:
                with pytest.raises(ValueError, match=refused.error):
                    model(**draw(family, head, input_kind))


@every_combination
def test_every_head_matches_the_untouched_model(family: Family, technique: str) -> None:
    for head in HEADS:
        if family in MISSING.get(head, ()):
            with pytest.raises(ValueError, match=r"Unrecognized configuration class"):
                tiny_model(family, head)  # type: ignore[arg-type]
        elif head in heads_with_every_input(family, technique) or (family in ENCODERS and head != "pooling"):
            continue  # covered by the test above, or a head on a decoder
        else:
            model = applied(technique, family, head)
            if model is not None and (technique, family, head, "right padding") not in UNDEFINED:
                check(model, technique, family, head, "right padding")


def test_every_refusal_in_the_table_is_used() -> None:
    combinations = product(TECHNIQUES, (*EVERY, *ENCODERS), HEADS, INPUTS)
    assert {refusal_of(*combination) for combination in combinations} == {None, *REFUSALS}
    assert {family for line in REFUSALS for family in line.families} <= {*EVERY, *ENCODERS}

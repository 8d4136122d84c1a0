"""Untrusted models, datasets and YAML files: code that they name is never executed."""

from __future__ import annotations

import ast
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from composer_speedups.core.errors import ConfigError, DataError
from composer_speedups.core.pretrained import pretrained_config
from composer_speedups.data.sources import load_samples
from composer_speedups.data.streams import stream_of_samples
from composer_speedups.data.tokens import load_tokenizer
from composer_speedups.predict.model import FinishedModel
from composer_speedups.tasks.classification import Classification
from composer_speedups.tasks.models import build_model
from composer_speedups.tasks.settings import DataConfig, ModelConfig
from composer_speedups.train.config.load import load_config
from tests.conftest import ROOT
from tests.helpers.jobs import MARKER, Payload, run
from tests.helpers.models import tiny_model


@pytest.mark.parametrize("text", ["!!python/object/apply:os.mkdir [ran]", "!!python/name:os.mkdir ''"])
def test_yaml_tags_cannot_run_python(text: str) -> None:
    Path("bad.yaml").write_text(f"run_name: {text}\n")
    for arguments in (("bad.yaml",), (None, [f"run_name={text}"])):
        with pytest.raises(ConfigError, match="not valid YAML"):
            load_config(*arguments)
    assert not MARKER.exists()


_CODE = f"import os\nos.mkdir({str(MARKER)!r})\n"


@pytest.mark.parametrize("model_type", ["bert", "their_own"])
def test_code_in_a_models_folder_is_never_run(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # accepts if transformers asks whether to run the code
    tiny_model("bert").save_pretrained("model")
    config = json.loads(Path("model/config.json").read_text())
    names = ("AutoConfig", "AutoModelForSequenceClassification", "AutoTokenizer")
    config |= {"model_type": model_type, "auto_map": dict.fromkeys(names, "code.Theirs"), "trust_remote_code": True}
    Path("model/config.json").write_text(json.dumps(config))
    Path("model/tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["code.Theirs", None]}}))
    Path("model/code.py").write_text(_CODE)
    if model_type == "bert":  # the type of a class in transformers
        words = WordPiece({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]")
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="[PAD]")
        assert build_model(ModelConfig(name="model"), Classification(), tokenizer, 16).model.config.model_type == "bert"
    else:
        with pytest.raises(ConfigError, match=r"model\.name: 'model' cannot be loaded"):
            build_model(ModelConfig(name="model"), Classification(), None, 16)
    with contextlib.suppress(ConfigError):
        load_tokenizer(DataConfig(), "model", None)
    assert not MARKER.exists()
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(Path("modules").absolute()))
    monkeypatch.setattr("sys.path", [*sys.path])
    with pytest.raises(AttributeError, match="Theirs"):
        AutoConfig.from_pretrained("model", trust_remote_code=True)
    assert MARKER.exists()  # with trust_remote_code, transformers runs it


KERNEL = "owner/kernel@revision"


def accept_files(folder: str) -> None:
    """Let ``predict`` read the files of a folder, whatever train.py exported."""
    file = Path(folder, "task.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "files": {}}))


@pytest.mark.parametrize("door", ["train", "random", "predict"])
@pytest.mark.parametrize(
    "hostile",
    [
        {"_attn_implementation": KERNEL},
        {"_attn_implementation_internal": KERNEL},
        {"attn_implementation": KERNEL, "experts_implementation": KERNEL, "_experts_implementation": KERNEL},
    ],
    ids=lambda hostile: next(iter(hostile)),
)
def test_a_kernel_that_a_configuration_names_is_never_loaded(
    hostile: dict[str, str], door: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = list[str]()

    def load(name: str, *_: object, **__: object) -> None:
        loaded.append(name)

    monkeypatch.setattr("transformers.modeling_utils.is_kernels_available", lambda *_: True)
    monkeypatch.setattr("transformers.integrations.hub_kernels.is_kernels_available", lambda *_: True)
    monkeypatch.setattr("transformers.integrations.hub_kernels.get_kernel", load)
    run("trainer.max_duration=1ba", "run_name=done", "data.vocab_size=128")
    path = Path("runs/done/model/config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **hostile}))
    accept_files("runs/done/model")
    if door == "predict":
        model = FinishedModel.load(Path("runs/done")).model
    else:
        tokenizer = load_tokenizer(DataConfig(), "runs/done/model", None)
        task = Classification(labels=["negative", "positive"])
        settings = ModelConfig(name="runs/done/model", init="random" if door == "random" else "pretrained")
        model = build_model(settings, task, tokenizer, 16).model
    assert model.config._attn_implementation in ("eager", "sdpa")
    assert loaded == []


def test_internals_are_left_out_of_the_configurations_of_parts_and_labels_are_kept() -> None:
    parts = {"text_config": {"_attn_implementation": KERNEL}, "vision_config": {"attn_implementation": KERNEL}}
    labels = {"label2id": {"_other": 1}, "id2label": {1: "_other"}}
    Path("clip").mkdir()
    Path("clip/config.json").write_text(
        json.dumps({"model_type": "clip", "_attn_implementation": KERNEL, **parts, **labels})
    )
    read = pretrained_config("clip")
    assert {part._attn_implementation for part in (read, read.text_config, read.vision_config)} == {None}
    assert read.label2id == {"_other": 1}


def with_adapter(folder: str) -> None:
    """Add an adapter to a model's folder, whose configuration names a module of the working directory."""
    adapter = LoraConfig(target_modules=["query"], megatron_config={"unused": 1}, megatron_core="theirs")
    adapter.save_pretrained(folder)
    Path("theirs.py").write_text(_CODE)


def test_a_module_that_an_adapter_names_is_never_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    load_tokenizer(DataConfig(tokenizer="wordpiece", vocab_size=128), "", ["a film"]).save_pretrained("model")
    tokenizer = load_tokenizer(DataConfig(), "model", None)
    tiny_model("bert").save_pretrained("model")
    with_adapter("model")
    assert load_tokenizer(DataConfig(), "model", None).get_vocab() == tokenizer.get_vocab()
    build_model(ModelConfig(name="model", init="random"), Classification(), tokenizer, 16)
    for technique in ([], ["algorithms.lora={}"]):
        with pytest.raises(ConfigError, match=r"^model\.name: 'model' has PEFT adapters .*; use the base model"):
            run("model.name=model", "model.init=pretrained", "model.size=null", "data.tokenizer=null", *technique)
    run("trainer.max_duration=1ba", "run_name=done")
    with_adapter("runs/done/model")
    with pytest.raises(ConfigError, match=r"^RUN: 'runs/done/model' has PEFT adapters"):
        FinishedModel.load(Path("runs/done"))
    Path("model/config.json").unlink()  # only an adapter; transformers loads the base model that it names
    with pytest.raises(ConfigError, match=r"^model\.name: 'model' cannot be loaded"):
        build_model(ModelConfig(name="model"), Classification(), tokenizer, 16)
    assert not MARKER.exists()
    tiny_model("bert").save_pretrained("model")
    with pytest.raises(AttributeError, match="theirs"):
        AutoModelForSequenceClassification.from_pretrained("model")
    assert MARKER.exists()  # PEFT imports it


def test_a_datasets_script_is_never_run() -> None:
    Path("theirs").mkdir()
    Path("theirs/theirs.py").write_text(_CODE)
    for streaming in (False, True):
        config = DataConfig(source="hub", hub_name="theirs", streaming=streaming)
        with pytest.raises(DataError, match="theirs"):
            stream_of_samples(config, 0) if streaming else load_samples(config, Classification())
    assert not MARKER.exists()


def unsafe_calls(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Calls that may execute what a file names: transformers' loaders that may trust code, and pickle."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if name.endswith(".from_pretrained"):
            safe = given.get("trust_remote_code") == "False"
        elif name == "torch.load":
            safe = given.get("weights_only") == "True"
        elif name in ("np.load", "numpy.load"):
            safe = given.get("allow_pickle", "False") == "False"
        else:
            safe = not name.startswith(("pickle.load", "pickle.Unpickler", "dill.load", "torch.hub."))
        if not safe:
            yield name, call.lineno


def test_no_call_trusts_files() -> None:
    for folder in ("composer_speedups", "benchmarks", "examples"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not [*unsafe_calls(ast.parse(path.read_text()))], path
    assert [*unsafe_calls(ast.parse("AutoModel.from_pretrained(x)\ntorch.load(x)\npickle.loads(x)"))] == [
        ("AutoModel.from_pretrained", 1),
        ("torch.load", 2),
        ("pickle.loads", 3),
    ]


def test_pickled_weights_are_never_unpickled() -> None:
    model = tiny_model("bert")
    model.config.save_pretrained("model")
    torch.save({**model.state_dict(), "payload": Payload()}, "model/pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"model\.name: 'model' cannot be loaded"):
        build_model(ModelConfig(name="model"), Classification(), None, 16)
    assert not MARKER.exists()

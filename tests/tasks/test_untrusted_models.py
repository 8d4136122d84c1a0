"""Untrusted models and YAML files: code that they name is never executed."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from transformers import AutoConfig, PreTrainedTokenizerFast

from composer_speedups.core.errors import ConfigError
from composer_speedups.data.tokens import load_tokenizer
from composer_speedups.tasks.classification import Classification
from composer_speedups.tasks.models import build_model
from composer_speedups.train.config.load import load_config
from composer_speedups.train.config.schema import DataConfig, ModelConfig
from tests.helpers.models import tiny_model
from tests.helpers.payload import MARKER, Payload


@pytest.mark.parametrize("text", ["!!python/object/apply:os.mkdir [ran]", "!!python/name:os.mkdir ''"])
def test_yaml_tags_cannot_run_python(text: str) -> None:
    Path("bad.yaml").write_text(f"run_name: {text}\n")
    with pytest.raises(ConfigError, match=r"bad\.yaml: not valid YAML"):
        load_config("bad.yaml")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(None, [f"run_name={text}"])
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


def test_pickled_weights_are_never_unpickled() -> None:
    model = tiny_model("bert")
    model.config.save_pretrained("model")
    torch.save({**model.state_dict(), "payload": Payload()}, "model/pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"model\.name: 'model' cannot be loaded"):
        build_model(ModelConfig(name="model"), Classification(), None, 16)
    assert not MARKER.exists()

"""Cards and README: all sections are present, the code and YAML run, and the figures match the committed rows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from composer.models import HuggingFaceModel
from torch.utils.data import DataLoader

from benchmarks.charts import Chart
from benchmarks.render import charts_of, documents, render
from composer_speedups.core.errors import Refusal
from composer_speedups.core.registry import build_techniques, folder_of, technique_class, technique_names
from composer_speedups.train.config.load import load_config
from tests.conftest import ROOT
from tests.helpers.common import plain_batches, tiny_bert
from tests.helpers.settings import ENTRIES

SECTIONS = [
    "How to use",
    "What it changes",
    "Expected effect",
    "When it will not help",
    "Exactness",
    "Requirements",
    "Conflicts",
    "Attribution",
]

CPU_REPLACEMENTS = {
    'MixedPrecision("bf16")': 'MixedPrecision("bf16", allow_cpu=True)',
    "BnbOptimizer()": "BnbOptimizer(min_8bit_size=1024)",
    "Float8Linear()": "Float8Linear(emulate=True)",
    "OffloadedOptimizer()": "OffloadedOptimizer(allow_cpu=True)",
    "LowBitOptimizer()": "LowBitOptimizer(min_size=1024)",
    'TorchCompile(scope="blocks")': 'TorchCompile(scope="blocks", backend="aot_eager")',  # inductor takes half a minute
}


def card(name: str) -> str:
    return (folder_of(name) / "README.md").read_text()


def shares_its_card(name: str) -> bool:
    return folder_of(name).name != name


def class_of(name: str) -> str:
    return technique_class(name).__name__


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def on_a_cpu(code: str) -> str:
    for original, replacement in CPU_REPLACEMENTS.items():
        code = code.replace(original, replacement)
    return code


@pytest.fixture
def names() -> dict[str, Any]:
    """Return the variables that the cards' code expects to exist."""
    model = HuggingFaceModel(tiny_bert(), use_logits=True)
    batch = plain_batches(1)[0]
    rows: Any = [{k: v[i % 4] for k, v in batch.items()} for i in range(8)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    return {"model": model, "train_dataloader": DataLoader(rows, batch_size=4), "optimizer": optimizer}


@pytest.mark.parametrize("name", technique_names())
def test_a_card_has_all_sections_in_order(name: str) -> None:
    assert re.findall(r"^## (.*)$", card(name), re.MULTILINE) == SECTIONS


@pytest.mark.parametrize("name", technique_names())
def test_the_code_of_a_card_runs(name: str, names: dict[str, Any]) -> None:
    code, class_name = blocks(card(name), "python")[0], class_of(name)
    if shares_its_card(name):  # its code names one class, and its table the others
        code = code.replace("FusedOptimizer", class_name)
    code = on_a_cpu(code)
    assert f"{class_name}(" in code
    if ENTRIES[name].variants:
        exec(code, names)
        techniques = {a.name: a for a in names["trainer"].state.algorithms}
        names["trainer"].close()
        assert techniques[name].engaged
    else:
        with pytest.raises(Refusal, match=name):
            exec(code, names)


@pytest.mark.parametrize("name", [name for name in technique_names() if not shares_its_card(name)])
def test_the_other_loop_of_a_card_runs(name: str, names: dict[str, Any]) -> None:
    _, *code = blocks(card(name), "python")
    if not code:
        assert "only for Composer's training loop" in card(name)
        return
    names["model"] = names["model"].model  # transformers' own
    assert f"{technique_class(name).__name__}(" in code[0]
    exec(on_a_cpu(code[0]), names)
    batch = plain_batches(1)[0]
    assert names["model"](**batch).loss.isfinite()


@pytest.mark.parametrize("name", technique_names())
def test_the_yaml_of_a_card_is_a_config(name: str) -> None:
    (text,) = blocks(card(name), "yaml")
    if shares_its_card(name):
        text = text.replace("fused_optimizer", name)
        (row,) = re.findall(rf"^\| `{name}` \| `{class_of(name)}` \| (.*)\|$", card(name), re.MULTILINE)
        defaults = {key: yaml.safe_load(value) for key, value in re.findall(r"`(\w+): (\w+)`", row)}
        technique: Any = technique_class(name)()
        assert repr(technique_class(name)(**defaults)) == repr(technique)
        assert len(defaults) == len(technique.model_fields) - 1, "the card lists every setting but on_unavailable"
    Path("card.yaml").write_text(text)
    config = load_config("card.yaml")
    assert name in config.algorithms
    assert build_techniques(config.algorithms)


@pytest.mark.parametrize("path", documents(), ids=lambda p: str(p.relative_to(ROOT)))
def test_figures_match_the_committed_rows(path: Path) -> None:
    assert render(path.read_text()) == path.read_text(), "run python -m benchmarks.render"


CHARTS = [chart for path in documents() for chart in charts_of(path.read_text())]


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.path.stem)
def test_charts_show_the_committed_rows(chart: Chart) -> None:
    assert not chart.is_stale(), "run python -m benchmarks.render"


@pytest.mark.parametrize("path", documents(), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_other_sentence_holds_measured_figures(path: Path) -> None:
    text = re.sub(
        r"^```.*?^```|^\|.*?$|<!-- rows: headline.*?end rows -->", "", path.read_text(), flags=re.DOTALL | re.MULTILINE
    )
    figures = re.findall(r"\d[\d,.]* (?:samples|tokens)/s|\d[\d.]* times as|\b0\.[89]\d\d\d\b|<!-- value.*", text)
    assert not figures, "a table holds figures, and a sentence says what it shows"


def test_the_readme_names_every_technique_and_its_code_runs(names: dict[str, Any]) -> None:
    text = (ROOT / "README.md").read_text()
    for name in technique_names():
        path, own = f"composer_speedups/algorithms/{folder_of(name).name}/README.md", card(name)
        if shares_its_card(name):
            path, own = f"{path}#{name}", own.split(f"### {name}\n")[1].partition("\n##")[0]
        purpose = technique_class(name).purpose
        assert f"[`{name}`]({path})" in text
        assert (f"It {purpose}; it does not make steps faster." in own) is (purpose != "saves time")
    code = blocks(text, "python")
    assert code
    with pytest.warns(UserWarning, match="continuing without"):  # techniques that need a GPU
        exec(code[0].replace("recommended()", 'recommended(on_unavailable="warn")'), names)
    names["trainer"].close()
    engaged = {technique.name for technique in names["trainer"].state.algorithms if technique.engaged}
    assert engaged == {"unpadding", "fused_layers", "fused_optimizer", "lean_dispatch"}
    names = {"model": tiny_bert()}
    exec(code[1].replace("apply_recommended(model)", "applied = apply_recommended(model)"), names)
    assert {"unpadding", "fused_layers"} <= set(names["applied"].evidence)

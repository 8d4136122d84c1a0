"""The documentation's pages: each block of code on them runs, and the notebook trains."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import yaml

from composer_speedups.recommendation import RECOMMENDED
from tests.conftest import ROOT
from tests.documents import Block, blocks_of, run_blocks
from tests.helpers.hangs import HANGS

DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if blocks_of(path.read_text()))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_the_code_of_a_page_runs(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*continuing without", category=UserWarning)
        run_blocks(blocks_of(path.read_text()), {})


def test_the_configs_of_pages_have_the_fused_layers_of_the_recommended_set() -> None:
    """The first one of the page that introduces the set is the whole of it."""
    configs = {
        path: [yaml.safe_load(code) for language, code in blocks_of(path.read_text()) if language == "yaml"]
        for path in PAGES
    }
    assert configs[DOCS / "which-techniques.md"][0] == {"algorithms": RECOMMENDED}
    for path, found in configs.items():
        fused = [config["algorithms"].get("fused_layers") for config in found if "algorithms" in config]
        assert all(settings in (None, RECOMMENDED["fused_layers"]) for settings in fused), path


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (Block("bash", "composer-speedups-trian -f quickstart\n"), "no such command"),
        (Block("bash", "composer-speedups-train -f quickstart data.bach_size=3\n"), "data.batch_size"),
        (Block("bash", "composer-speedups-tune -f bert_imdb tune.budget=3\n"), "tune.budget_seconds"),
        (Block("bash", "pip install '.[minlm]'\n"), "minlm"),
        (Block("yaml", "data: {bach_size: 3}\n"), "data.batch_size"),
        (Block("python", "from composer_speedups import Unpading\n"), "Unpading"),
        (Block("sh", "true\n"), "a block of language 'sh'"),
    ],
)
def test_a_block_that_no_reader_could_run_is_noticed(block: Block, message: str) -> None:
    with pytest.raises(Exception, match=message):
        run_blocks([block], {})


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_notebook_trains() -> None:
    """20 batches. tests/train/test_command_line.py checks what the quickstart learns."""
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient, of the dev group")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(ROOT / "examples" / "quickstart.ipynb", as_version=4)
    committed = json.dumps([cell.get("outputs") for cell in notebook.cells])
    assert "times as fast" in committed, "committed with its outputs"
    assert "image/png" in committed
    assert str(Path.home()) not in committed, "no path of the machine that ran it"
    brief = ["trainer.max_duration=20ba", "data.eval_samples=40", "baseline.batches=10"]
    train = 'main(["-f", "quickstart"])'
    [cell] = (cell for cell in notebook.cells if train in cell.source)
    cell.source = cell.source.replace(train, f"main({['-f', 'quickstart', *brief]})")
    nbclient.NotebookClient(notebook, timeout=int(HANGS), resources={"metadata": {"path": str(Path.cwd())}}).execute()
    printed = json.dumps([cell.get("outputs") for cell in notebook.cells])
    assert "times as fast" in printed
    assert "negative" in printed or "positive" in printed
    assert json.loads(Path("runs/quickstart/report.json").read_text())["training"]["batches"] == 20

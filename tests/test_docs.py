"""The documentation's pages: each block of code on them runs, every page is in the navigation, the notebook trains."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.conftest import ROOT
from tests.helpers.documents import Block, blocks_of, run_blocks
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


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (Block("bash", "composer-speedups-trian -f quickstart\n"), "no such command"),
        (Block("bash", "composer-speedups-train -f quickstart data.bach_size=3\n"), "data.batch_size"),
        (Block("bash", "pip install '.[minlm]'\n"), "minlm"),
        (Block("yaml", "data: {bach_size: 3}\n"), "data.batch_size"),
        (Block("python", "from composer_speedups import Unpading\n"), "Unpading"),
        (Block("sh", "true\n"), "a block of language 'sh'"),
    ],
)
def test_a_block_that_no_reader_could_run_is_noticed(block: Block, message: str) -> None:
    with pytest.raises(Exception, match=message):
        run_blocks([block], {})


def test_every_page_is_in_the_navigation() -> None:
    class Loader(yaml.SafeLoader):
        """mkdocs.yml may hold tags of Python."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]

    def leaves(value: object) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from leaves(item)

    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert set(leaves(nav)) - {"api/algorithms.md", "api/config.md"} == pages, "docs/hooks.py makes these two"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_notebook_trains() -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient, of the dev group")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(ROOT / "examples" / "quickstart.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "committed without outputs"
    nbclient.NotebookClient(notebook, timeout=int(HANGS), resources={"metadata": {"path": str(Path.cwd())}}).execute()
    printed = json.dumps([cell.get("outputs") for cell in notebook.cells])
    assert "times as fast" in printed
    assert "negative" in printed or "positive" in printed
    report = json.loads(Path("runs/quickstart/report.json").read_text())
    assert report["metrics"]["accuracy"] > 0.8

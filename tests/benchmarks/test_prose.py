"""A measured figure in a sentence is a value of the rows, is labelled as measured by hand, or is allowed here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.render import documents
from benchmarks.values import without_values
from tests.conftest import ROOT

DOCUMENTS = [*documents(), ROOT / "benchmarks" / "tuned" / "README.md"]
BY_HAND = "no committed row"  # of a paragraph, a list's item or a table, whose figures are labelled so
_NUMBER = r"(?:\d[\d,.]*|\b(?:two|three|four|five|six|seven|eight|nine|ten|twenty|thirty|half|a few|some)\b)"
_UNIT = r"(?:samples/s|tokens/s|ms|µs|us|s|seconds|minutes|[KMG]i?B|times|per cent|percent)\b|%"
MEASURED = re.compile(
    rf"(?<![\w.-]){_NUMBER}(?:–{_NUMBER})?[ -]?(?:{_UNIT})"
    r"|\bratio[^.;…]{0,30}\b\d+\.\d+|\b(?:twice|half) (?:as|the)\b|\b0\.[89]\d\d\d\b",
    re.IGNORECASE,
)

# Document, part of the sentence, and why its figure needs no row.
ALLOWED = [
    ("docs/RELIABILITY.md", "within the test's limit of 40 s", "what the test allows"),
    ("docs/RELIABILITY.md", "the test's tolerance of 10%", "what the test allows"),
    ("docs/data.md", "25,000 reviews take 25 MB", "arithmetic: 4 bytes per token"),
    ("docs/data.md", "10 GB on every rank", "arithmetic: 4 bytes per token"),
    ("docs/distributed.md", "as on SIGTERM, within 30 s", "a limit that the code sets"),
    ("docs/index.md", "MiniLM-L6's weights, 90 MB", "the size of a download"),
    ("docs/results.md", "a V100 with 16 GB", "the published table's GPU"),
    ("docs/results.md", "Our target for DDP is an efficiency of 95%", "a target"),
    ("composer_speedups/algorithms/cuda_graphs/README.md", "segments of 50 MiB", "a constant of the code"),
    ("composer_speedups/algorithms/offloaded_optimizer/README.md", "16 MiB at a time", "a constant of the code"),
    ("composer_speedups/algorithms/lora/README.md", "LoRA at ten times the learning rate", "a setting of the table"),
    ("composer_speedups/algorithms/sparse_upcycling/README.md", "half the pretraining's cost", "the paper's"),
]


def prose(text: str) -> Iterator[str]:
    """Paragraphs, items and tables without code, rendered figures, values, links' targets and what is labelled."""
    text = re.sub(r"<!-- rows: (.*?) -->\n.*?<!-- end rows -->", "", text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = without_values(text)
    text = re.sub(r"`[^`\n]*`|\]\([^)]*\)", " ", text)
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        if BY_HAND not in paragraph:
            yield " ".join(paragraph.split())


def unsupported(document: str, text: str) -> list[str]:
    """The figures that look measured and are neither values, labelled nor allowed, each in its sentence."""
    found = []
    for paragraph in prose(text):
        for name, sentence, _ in ALLOWED:
            if name == document:
                paragraph = paragraph.replace(sentence, "")
        for match in MEASURED.finditer(paragraph):
            found.append(f"{match[0]!r} in {paragraph[max(0, match.start() - 60) : match.end() + 20]!r}")
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_measured_figures_in_sentences_are_values_of_the_rows(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    assert not unsupported(name, path.read_text()), "use <!-- value: … --> (benchmarks/values.py), or label it by hand"


def test_every_allowed_sentence_is_still_there() -> None:
    for document, sentence, reason in ALLOWED:
        assert reason
        assert any(sentence in paragraph for paragraph in prose((ROOT / document).read_text())), (document, sentence)


@pytest.mark.parametrize(
    "sentence",
    [
        "It trains 3,832 samples/s.",
        "It takes 32.4 ms per step.",
        "It is 1.5 times as fast.",
        "In 60 % of the memory.",
        "In 60% of the memory.",
        "The peak is 7.5\nGiB.",
        "Compiling costs 20 s.",
        "It saves five to six seconds.",
        "It costs a few per cent.",
        "The ratio was 1.53 in that call.",
        "A step takes twice as long.",
        "The accuracy is 0.8966.",
        "| `ladder`: 1.02 times at batch 128 |",
        "A value <!-- value: fast batch=128; ours; samples/s -->3,832<!-- end --> samples/s, and 3,753 samples/s.",
    ],
)
def test_a_figure_written_by_hand_is_noticed(sentence: str) -> None:
    assert unsupported("README.md", f"Text.\n\n{sentence}\n")


@pytest.mark.parametrize(
    "text",
    [
        "A value of <!-- value: fast batch=128; ours; samples/s -->3,832<!-- end --> samples/s.",
        "<!-- rows: steps fast -->\n| 128 | 3,832 samples/s |\n<!-- end rows -->",
        "```\n3,832 samples/s\n```",
        "The key `warmup: 20 s` sets it.",
        "A step takes 36.3 ms (measured by hand, no committed row).",
        "8-bit state with bf16, 128 × 256 tokens, torch 2.11, four GPUs, two epochs of 8,000 reviews.",
    ],
)
def test_supported_figures_and_numbers_that_are_not_measured_pass(text: str) -> None:
    assert not unsupported("README.md", text)


def test_the_label_holds_for_its_paragraph_only() -> None:
    assert unsupported("README.md", "It takes 36.3 ms (measured by hand, no committed row).\n\nIt takes 36.3 ms.")
    assert unsupported("README.md", "- It takes 36.3 ms (no committed row).\n- It takes 36.3 ms.")

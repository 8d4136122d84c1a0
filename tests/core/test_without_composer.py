"""What needs neither Composer nor torch: declarations and ``--help``; and what needs no Composer: other loops."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ROOT
from tests.helpers.hangs import HANGS

DENY = """
import sys

class Deny:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in DENIED:
            raise ImportError(f"{name} is not installed")

sys.meta_path.insert(0, Deny())
"""

DECLARATIONS = """
import composer_speedups
from composer_speedups.core.registry import technique_class, technique_names
from composer_speedups.train.cli import help_text

for name in technique_names():
    technique = technique_class(name)()
    assert getattr(composer_speedups, type(technique).__name__) is type(technique)
    assert f"  {name}: " in help_text()
assert len(technique_names()) > 12
"""

OTHER_LOOP = """
import torch
from transformers import BertConfig, BertForSequenceClassification
from composer_speedups import FastLayerNorm, FusedLayers, GradientCheckpointing, MixedPrecision, TorchCompile
from composer_speedups import Unpadding, apply, apply_recommended

sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=9)
some = [FastLayerNorm(), MixedPrecision(allow_cpu=True), TorchCompile("blocks", "eager")]
for techniques in ([Unpadding(), FusedLayers(), GradientCheckpointing()], some, None):
    model = BertForSequenceClassification(BertConfig(**sizes)).train()
    optimizer = torch.optim.AdamW(model.parameters())
    applied = apply_recommended(model) if techniques is None else apply(model, techniques, optimizer)
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    for _ in range(2):
        model(input_ids=torch.ones_like(mask), attention_mask=mask, labels=torch.tensor([0, 1])).loss.backward()
        optimizer.step()
    assert all(len(found) > 1 for found in applied.evidence.values()), applied.evidence
    applied.undo()
"""


def _runs(program: str, *denied: str) -> None:
    text = f"DENIED = {denied!r}\n{DENY}\n{program}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text], cwd=ROOT, capture_output=True, text=True, timeout=HANGS
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_declarations_and_help_need_neither_torch_nor_composer() -> None:
    _runs(DECLARATIONS, "torch", "composer", "transformers", "numpy")


def test_other_loops_do_not_need_composer() -> None:
    _runs(OTHER_LOOP, "composer")

"""python -m benchmarks.proteins FOLDER: write the samples, configuration and tokenizer of the table esm2.

Proteins are amino acids drawn at random, of log-normal lengths: a median of 290 and a mean of about 360, where the mean
of UniProt's release 2023_03 is 349. Labels are random too, so there is nothing to learn. The configuration is that of
ESM-2 with 650 million parameters. Everything is the same at each call.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from transformers import EsmConfig, EsmTokenizer

_SEED = 17
_MEDIAN, _SIGMA, _LEAST, _MOST = 290, 0.66, 20, 5000  # amino acids; longer proteins are cut off
_SAMPLES = 4096
_TOKENS = "<cls> <pad> <eos> <unk> L A G V S E R T I D P K Q N F Y M H W C X B U Z O . - <null_1> <mask>".split()
_AMINO_ACIDS = _TOKENS[4:24]
_SHAPE: dict[str, Any] = {
    "hidden_size": 1280,
    "num_hidden_layers": 33,
    "num_attention_heads": 20,
    "intermediate_size": 5120,
}


def proteins(count: int) -> dict[str, list[Any]]:
    """``count`` proteins: ``{"text": [str], "label": [0 or 1]}``."""
    rng = random.Random(_SEED)
    lengths = [round(min(max(_MEDIAN * rng.lognormvariate(0, _SIGMA), _LEAST), _MOST)) for _ in range(count)]
    texts = ["".join(rng.choices(_AMINO_ACIDS, k=length)) for length in lengths]
    return {"text": texts, "label": [rng.randrange(2) for _ in texts]}


def write_proteins(folder: Path, count: int = _SAMPLES, **shape: int) -> None:
    """Write train.parquet, config.json and the tokenizer's files; ``shape`` replaces fields of the configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.table(proteins(count)), folder / "train.parquet")
    config = EsmConfig(
        vocab_size=len(_TOKENS),
        pad_token_id=_TOKENS.index("<pad>"),
        mask_token_id=_TOKENS.index("<mask>"),
        max_position_embeddings=1026,
        layer_norm_eps=1e-5,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        position_embedding_type="rotary",
        emb_layer_norm_before=False,
        token_dropout=True,
        **(_SHAPE | shape),
    )
    config.save_pretrained(folder)
    with tempfile.TemporaryDirectory() as name:
        vocabulary = Path(name) / "vocab.txt"
        vocabulary.write_text("\n".join(_TOKENS))
        EsmTokenizer(str(vocabulary)).save_pretrained(folder)


if __name__ == "__main__":
    write_proteins(Path(sys.argv[1]))

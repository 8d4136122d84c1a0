"""The FLOPs that are counted for a model family are those that torch counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from composer_speedups.algorithms.layer_freezing.modules import freeze
from composer_speedups.families.flops import block_runs, frozen_flops, training_flops

LENGTH = 24
TINY: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64,
}  # fmt: skip
SPECIAL = {f"{name}_token_id": 0 for name in ("pad", "bos", "eos", "cls", "sep")}  # in the vocabulary
# As many table entries as tokens, because transformers computes a score for each entry, not for each token.
DISENTANGLED: dict[str, Any] = {
    **TINY, "relative_attention": True, "position_buckets": LENGTH // 2, "share_att_key": False,
}  # fmt: skip
T5: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 3}
MODELS = {
    "BERT": ("Bert", TINY),
    "DeBERTa, both scores": ("DebertaV2", {**DISENTANGLED, "pos_att_type": ["p2c", "c2p"]}),
    "DeBERTa, one score": ("DebertaV2", {**DISENTANGLED, "pos_att_type": ["c2p"]}),
    "DeBERTa, no relative positions": ("DebertaV2", TINY),
    "ESM-2": ("Esm", {**TINY, "position_embedding_type": "rotary", "pad_token_id": 1}),
    "EuroBERT, shared keys": ("EuroBert", {**TINY, **SPECIAL, "num_key_value_heads": 1}),
    "Jina Embeddings v3": ("JinaEmbeddingsV3", TINY),
    "NomicBERT": ("NomicBert", TINY),
    "DistilBERT": ("DistilBert", {"vocab_size": 64, "dim": 32, "n_layers": 3, "n_heads": 2, "hidden_dim": 64}),
    "ModernBERT": ("ModernBert", {**TINY, **SPECIAL, "local_attention": 2 * LENGTH}),
    "T5": ("T5", T5),
    "T5, gated": ("T5", {**T5, "feed_forward_proj": "gated-gelu"}),
}


def _config(name: str) -> Any:
    family, settings = MODELS[name]
    return getattr(transformers, f"{family}Config")(**settings)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.pins
def test_a_familys_flops_equal_torchs_count(name: str) -> None:
    config = _config(name)
    encoder = "T5EncoderModel" if name.startswith("T5") else f"{MODELS[name][0]}Model"
    model: Any = getattr(transformers, encoder)._from_config(config, attn_implementation="eager")
    ids = torch.randint(5, 64, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state.sum().backward()
    # The pooler and classifier are less than one per cent of the total; a matrix of a layer is more than four.
    assert training_flops(config, np.full(3, LENGTH), "classification") == pytest.approx(
        counter.get_total_flops(), rel=0.01
    )


@pytest.mark.parametrize("layers", [0, 1, 2, 3])
def test_frozen_layers_count_what_torch_counts(layers: Any) -> None:
    model = transformers.BertModel._from_config(_config("BERT"), attn_implementation="eager")
    freeze(model, (), layers)
    ids, lengths = torch.randint(5, 64, (3, LENGTH)), np.full(3, LENGTH)
    with FlopCounterMode(display=False) as counter:
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids))
        (output.last_hidden_state.sum() + output.pooler_output.sum()).backward()
    # torch does not compute the input gradients of the first trained block's three projections either
    counted = training_flops(model.config, lengths, "classification") - frozen_flops(model, block_runs(model), lengths)
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.12)
    assert counted >= counter.get_total_flops()
    plain, cached = (frozen_flops(model, block_runs(model), lengths, cached=cached) for cached in (False, True))
    assert cached - plain == plain // 2, "the forward pass of the frozen blocks"


def test_a_local_layer_counts_the_pairs_in_its_window() -> None:
    lengths = [0, 1, 2, 7, 20]
    settings = {**TINY, **SPECIAL, "num_hidden_layers": 1, "local_attention": 8}
    counts = {}
    for kind in ("full_attention", "sliding_attention"):
        config = transformers.ModernBertConfig(**settings, layer_types=[kind])
        counts[kind] = training_flops(config, np.array(lengths), "classification")
    pairs = {"full_attention": 0, "sliding_attention": 0}
    for length in lengths:
        places = torch.arange(length)
        near = (places[:, None] - places).abs() <= 4
        pairs["full_attention"] += near.numel()
        pairs["sliding_attention"] += int(near.sum())
    assert counts["full_attention"] - counts["sliding_attention"] == 3 * 4 * 32 * (
        pairs["full_attention"] - pairs["sliding_attention"]
    )

"""Compare each Triton kernel with plain PyTorch at one shape and dropout rate; a part of the programs imported here."""

from __future__ import annotations

import torch

from composer_speedups.families.family import DropoutRates
from tests.reference import adapters, fused_kernels, positional_kernels

if __name__ == "__main__":
    torch.manual_seed(0)
    fused_kernels.LENGTHS = [5, 0, 70]  # one block of keys, and two
    positional_kernels.use_lengths([5, 0, 37], 64)
    fused_kernels.norms(0.25)
    fused_kernels.attentions(0.25)
    fused_kernels.attentions(biased=True)
    fused_kernels.pre_norms(0.25)
    fused_kernels.geglus(0.25)
    fused_kernels.embeddings(0.25, mixed=True)
    fused_kernels.float8_kernels(0.25)
    fused_kernels.gelus()
    fused_kernels.casts()
    fused_kernels.rotations()
    fused_kernels.first_tokens(0.3, 70)
    fused_kernels.gated_layers(7, first=False, dropouts=[])
    positional_kernels.disentangled(0.3, 2, 16)
    fused_kernels.dropped_layer(DropoutRates(0.3, 0.2, 0.4))
    adapters.compare_dropout()
    adapters.compare_narrow()
    adapters.compare(dict.fromkeys(adapters.LINEARS, (4, 0.0)))

"""A feed-forward block made of experts, and what the experts of one model share.

Shape suffixes: T tokens (padding included), H hidden, E experts, K experts a token goes to, S = T·K slots.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import skip_init

ROUTER_STD = 0.02  # arXiv 2212.05055, section 3.1


class Expert(nn.Module):
    """A copy of a dense feed-forward block: up, activation, down."""

    def __init__(self, up: nn.Module, activation: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.activation, self.down = copy.deepcopy(up), copy.deepcopy(activation), copy.deepcopy(down)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down(self.activation(self.up(hidden)))
        return output


class Routing:
    """What a forward pass of one model leaves for its loss: noted by the layers, begun and ended by hooks.

    The loss is computed when the encoder is done, outside of any activation checkpoint: what is recomputed in the
    backward pass notes nothing.

    Attributes:
        balance: Layer's name → its load-balancing loss, a scalar with a gradient.
        load: Layer's name → share of the real tokens' slots that went to each expert, shape (E,).
    """

    def __init__(self) -> None:
        self.balance: dict[str, Tensor] = {}
        self.load: dict[str, Tensor] = {}
        self._mask: Tensor | None = None
        self._noted: dict[str, tuple[Tensor, Tensor, torch.Size]] | None = None  # None outside of a pass

    @torch.compiler.disable
    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of the encoder: every family takes its attention mask second."""
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        if mask is not None and mask.dim() != 2:
            raise ValueError(f"load balancing needs an attention mask of shape (rows, tokens), not {tuple(mask.shape)}")
        self.balance, self.load, self._mask, self._noted = {}, {}, mask, {}

    def note(self, name: str, probabilities_TE: Tensor, chosen_TK: Tensor, positions: torch.Size) -> None:
        """A layer's routing in training; ``positions`` is the shape of its input but for the last dimension."""
        if self._noted is not None and probabilities_TE.requires_grad:
            self._noted[name] = probabilities_TE, chosen_TK, positions

    @torch.compiler.disable
    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook of the encoder."""
        for name, (probabilities_TE, chosen_TK, positions) in (self._noted or {}).items():
            real_T = self.real_tokens(positions, probabilities_TE.device)
            self.balance[name], share_E = balance_loss(probabilities_TE, chosen_TK, real_T)
            self.load[name] = share_E.detach()
        self._mask = self._noted = None

    def real_tokens(self, positions: torch.Size, device: torch.device) -> Tensor | None:
        """Which tokens are no padding, bool (T,); None for all of them.

        An encoder that packs its real tokens (the unpadding technique) has them first.
        """
        if self._mask is None:
            return None
        mask_T = self._mask.reshape(-1) != 0
        if positions == self._mask.shape:
            return mask_T
        return torch.arange(positions.numel(), device=device) < mask_T.sum()

    def __getstate__(self) -> dict[str, Any]:
        return {}  # a model can be copied or pickled between passes; what one pass left cannot

    def __setstate__(self, state: dict[str, Any]) -> None:
        Routing.__init__(self)


def balance_loss(probabilities_TE: Tensor, chosen_TK: Tensor, real_T: Tensor | None) -> tuple[Tensor, Tensor]:
    """The load-balancing loss of one layer, and the share of slots that each expert got.

    ``E · Σ share·probability``, over real tokens: 1 when both are uniform, E when one expert gets everything, 0
    without a real token. Its gradient goes through the probabilities alone.

    Source: Switch Transformer, arXiv 2101.03961, section 2.2; its share of tokens is here that of the T·K slots.
    """
    tokens, experts = probabilities_TE.shape
    weight_T = probabilities_TE.new_ones(tokens) if real_T is None else real_T.to(probabilities_TE.dtype)
    count = weight_T.sum().clamp(min=1)
    slots_TE = F.one_hot(chosen_TK, experts).sum(1)
    share_E = (slots_TE * weight_T[:, None]).sum(0) / (count * chosen_TK.shape[1])
    probability_E = (probabilities_TE * weight_T[:, None]).sum(0) / count
    return experts * (share_E * probability_E).sum(), share_E


class SparseFeedForward(nn.Module):
    """Experts behind a router: each token goes to the ``top_k`` that the router likes best.

    No expert has a capacity, so no token is dropped; the weights of a token's experts add up to one, so copies of
    one dense block give what the block gave.

    Args:
        up, activation, down: The dense block; copied once for each expert.
        experts: How many.
        top_k: Experts a token goes to.
        name: The layer's, under which ``routing`` keeps its loss.
        routing: Shared by the layers of a model.
    """

    def __init__(
        self,
        up: nn.Linear,
        activation: nn.Module,
        down: nn.Linear,
        *,
        experts: int,
        top_k: int,
        name: str,
        routing: Routing,
    ) -> None:
        super().__init__()
        weight = up.weight
        # Drawn on the CPU, after nothing else was: the same choices wherever the model is.
        self.router = skip_init(
            nn.Linear, up.in_features, experts, bias=False, device=weight.device, dtype=weight.dtype
        )
        with torch.no_grad():
            self.router.weight.copy_(torch.randn(self.router.weight.shape) * ROUTER_STD)
        self.router.weight.requires_grad_(weight.requires_grad)
        self.experts = nn.ModuleList(Expert(up, activation, down) for _ in range(experts))
        self.top_k, self.name, self.routing = top_k, name, routing

    @torch.compiler.disable  # its shapes are those of the data: compiled, it would be compiled again and again
    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden`` (…, H) → (…, H) in the dtype the dense block would have given."""
        x_TH = hidden.reshape(-1, hidden.shape[-1])
        with torch.autocast(hidden.device.type, enabled=False):  # a softmax of 16-bit logits would flip choices
            probabilities_TE = F.linear(x_TH.float(), self.router.weight.float()).softmax(-1)
            top_TK, chosen_TK = probabilities_TE.topk(self.top_k)
            weights_TK = top_TK / top_TK.sum(-1, keepdim=True)
        if self.training:
            self.routing.note(self.name, probabilities_TE, chosen_TK, hidden.shape[:-1])
        outputs_TKH = self._dispatch(x_TH, chosen_TK)
        combined_TH = (outputs_TKH * weights_TK[..., None]).sum(1).to(outputs_TKH.dtype)
        return combined_TH.view(*hidden.shape[:-1], -1)

    def _dispatch(self, x_TH: Tensor, chosen_TK: Tensor) -> Tensor:
        """Each token through its experts, (T, K, H): slots sorted by expert, then one pass an expert.

        An expert without a token runs on no rows: its gradients are then zero, not missing, as DDP needs them.
        """
        chosen_S = chosen_TK.reshape(-1)
        order_S = chosen_S.argsort(stable=True)
        rows = torch.bincount(chosen_S, minlength=len(self.experts)).tolist()  # here the host waits for the device
        sorted_SH = x_TH.index_select(0, order_S // self.top_k)
        outputs = [expert(part) for expert, part in zip(self.experts, sorted_SH.split(rows), strict=True)]
        outputs_SH = torch.cat(outputs).index_select(0, order_S.argsort())
        return outputs_SH.view(*chosen_TK.shape, -1)

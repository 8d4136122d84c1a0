"""A feed-forward layer of experts, its router, and the load-balancing loss.

Shape suffixes: T tokens (including padding), H hidden units, E experts, K experts per token, S = T·K slots.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import skip_init

from composer_speedups.kernels.host import ran

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
    """The routing of a model's last forward pass: recorded by the layers, started and finished by hooks of the encoder.

    The losses are computed after the encoder, outside of activation checkpoints. Layers that are recomputed in the
    backward pass record nothing.

    Attributes:
        balance: Load-balancing loss of each layer by name, a scalar with a gradient.
        load: Share of the real tokens' slots of each expert, shape (E,), by name of the layer.
    """

    def __init__(self) -> None:
        self.balance: dict[str, Tensor] = {}
        self.load: dict[str, Tensor] = {}
        self._mask: Tensor | None = None
        self._noted: dict[str, tuple[Tensor, Tensor, torch.Size]] | None = None  # None outside of a forward pass

    @torch.compiler.disable
    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Start recording. A forward pre-hook of the encoder, whose second argument is the mask in every family."""
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        if mask is not None and mask.dim() != 2:
            raise ValueError(f"load balancing needs an attention mask of shape (rows, tokens), not {tuple(mask.shape)}")
        self.balance, self.load, self._mask, self._noted = {}, {}, mask, {}

    def note(self, name: str, probabilities_TE: Tensor, chosen_TK: Tensor, positions: torch.Size) -> None:
        """Record a layer's routing in training; ``positions`` is its input's shape without the last dimension."""
        if self._noted is not None and probabilities_TE.requires_grad:
            self._noted[name] = probabilities_TE, chosen_TK, positions

    @torch.compiler.disable
    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Compute the losses and stop recording. A forward hook of the encoder."""
        for name, (probabilities_TE, chosen_TK, positions) in (self._noted or {}).items():
            real_T = self.real_tokens(positions, probabilities_TE.device)
            self.balance[name], share_E = balance_loss(probabilities_TE, chosen_TK, real_T)
            self.load[name] = share_E.detach()
        self._mask = self._noted = None

    def real_tokens(self, positions: torch.Size, device: torch.device) -> Tensor | None:
        """Return which tokens are not padding, bool (T,); None if all are real.

        In an encoder that packs its tokens (the unpadding technique), the real ones are first.
        """
        if self._mask is None:
            return None
        mask_T = self._mask.reshape(-1) != 0
        if positions == self._mask.shape:
            return mask_T
        return torch.arange(positions.numel(), device=device) < mask_T.sum()

    def __getstate__(self) -> dict[str, Any]:
        return {}  # models can be copied and pickled, but tensors with a gradient function cannot

    def __setstate__(self, state: dict[str, Any]) -> None:
        Routing.__init__(self)


def balance_loss(probabilities_TE: Tensor, chosen_TK: Tensor, real_T: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the load-balancing loss of one layer, and each expert's share of the slots.

    The loss is ``E · Σ share·probability`` over real tokens: 1 if both are uniform, E if one expert gets all slots, 0
    without a real token. Its gradient flows only through the probabilities.

    Source: Switch Transformer, arXiv 2101.03961, section 2.2, with shares of the T·K slots in place of the tokens.
    """
    tokens, experts = probabilities_TE.shape
    weight_T = probabilities_TE.new_ones(tokens) if real_T is None else real_T.to(probabilities_TE.dtype)
    count = weight_T.sum().clamp(min=1)
    slots_TE = F.one_hot(chosen_TK, experts).sum(1)
    share_E = (slots_TE * weight_T[:, None]).sum(0) / (count * chosen_TK.shape[1])
    probability_E = (probabilities_TE * weight_T[:, None]).sum(0) / count
    return experts * (share_E * probability_E).sum(), share_E


class SparseFeedForward(nn.Module):
    """Experts with a router, which sends each token to its ``top_k`` most probable experts.

    Experts have no capacity limit, so no token is dropped. The weights of a token's experts add up to one, so the
    output of equal experts is that of the dense block.

    Args:
        up, activation, down: The dense block; copied for each expert.
        experts: Number of experts.
        top_k: Experts per token.
        name: Name of the layer, the key of its loss in ``routing``.
        routing: The model's routing, shared by its layers.
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
        # The router's weights are drawn on the CPU, and no other number is, so they do not depend on the device.
        self.router = skip_init(
            nn.Linear, up.in_features, experts, bias=False, device=weight.device, dtype=weight.dtype
        )
        with torch.no_grad():
            self.router.weight.copy_(torch.randn(self.router.weight.shape) * ROUTER_STD)
        self.router.weight.requires_grad_(weight.requires_grad)
        self.experts = nn.ModuleList(Expert(up, activation, down) for _ in range(experts))
        self.top_k, self.name, self.routing = top_k, name, routing

    @torch.compiler.disable  # its shapes depend on the data, so it would be recompiled repeatedly
    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``hidden`` (…, H) to (…, H), in the dtype of the dense block's output."""
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
        """Run each token through its experts, (T, K, H), with slots sorted by expert and one call per expert.

        An expert without tokens is called with no rows, so its gradients are zero instead of None, as DDP requires.
        """
        chosen_S = chosen_TK.reshape(-1)
        order_S = chosen_S.argsort(stable=True)
        rows = torch.bincount(chosen_S, minlength=len(self.experts)).tolist()  # synchronizes with the device
        sorted_SH = x_TH.index_select(0, order_S // self.top_k)
        outputs = [expert(x) for expert, x in zip(self.experts, sorted_SH.split(rows), strict=True)]
        for index, count in enumerate(rows):
            if count:
                ran(f"{self.name} expert {index}")
        outputs_SH = torch.cat(outputs).index_select(0, order_S.argsort())
        return outputs_SH.view(*chosen_TK.shape, -1)


def sparse_layers(model: nn.Module) -> list[SparseFeedForward]:
    """Return the layers of experts in a model, first to last."""
    return [m for m in model.modules() if isinstance(m, SparseFeedForward)]


def load_balancing_loss(model: nn.Module) -> Tensor | None:
    """The load-balancing loss of the last forward pass in training mode, a scalar with a gradient, summed over layers.

    A layer's loss is 1 if its real tokens are spread evenly, and at most ``experts / top_k``. None if there was no
    forward pass in training mode with gradients.

    Source: Switch Transformer, arXiv 2101.03961, section 2.2.
    """
    losses = list(sparse_layers(model)[0].routing.balance.values())
    return torch.stack(losses).sum() if losses else None


def add_to_loss(loss: Any, extra: Tensor) -> Any:
    """Add a term to a ComposerModel's loss and return it in the same form.

    Composer accepts a tensor, a list or tuple of tensors (which it sums), or a dict (of which it uses ``total``, or
    else the sum).
    """
    if isinstance(loss, dict):
        total = {"total": loss["total"] + extra} if "total" in loss else {}
        return {**loss, **total, "load_balancing": extra}
    if isinstance(loss, (list, tuple)):
        return [*loss, extra]
    return loss + extra

"""Feed-forward layers of experts with routers: their modules, the load-balancing loss, and how a model gets them.

Shape suffixes: T tokens (including padding), H hidden units, E experts, K experts per token, S = T·K slots.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import skip_init
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from composer_speedups.core.optimizer_state import replace_parameters
from composer_speedups.core.pretrained import pretrained_config
from composer_speedups.core.stock import outermost_models
from composer_speedups.families.family import families, family_of, family_titles
from composer_speedups.kernels.common import ran

_ROUTER_STD = 0.02  # arXiv 2212.05055, section 3.1
_PARTS = ("up", "activation", "down")


class Routing:
    """What the layers of a model chose in a forward pass, while it is recorded, and the mask of that pass."""

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        # layer → probabilities (T, E), chosen experts (T, K), and its input's shape without the last dimension
        self.noted: dict[str, tuple[Tensor, Tensor, torch.Size]] | None = None

    @torch.compiler.disable
    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A forward pre-hook of the encoder, whose second argument is the mask in every family."""
        self.mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        if self.mask is not None and self.mask.dim() != 2:
            raise ValueError(
                f"load balancing needs an attention mask of shape (rows, tokens), not {tuple(self.mask.shape)}"
            )

    def losses(self) -> list[Tensor]:
        """The load-balancing loss of each layer, a scalar with a gradient; ends the recording."""
        noted, self.noted = self.noted or {}, None
        return [
            balance_loss(probabilities_TE, chosen_TK, self.real_tokens(positions, probabilities_TE.device))
            for probabilities_TE, chosen_TK, positions in noted.values()
        ]

    def real_tokens(self, positions: torch.Size, device: torch.device) -> Tensor | None:
        """Which tokens are not padding, bool (T,); None if all are real. A packed encoder has the real ones first."""
        if self.mask is None:
            return None
        mask_T = self.mask.reshape(-1) != 0
        return mask_T if positions == self.mask.shape else torch.arange(positions.numel(), device=device) < mask_T.sum()


def balance_loss(probabilities_TE: Tensor, chosen_TK: Tensor, real_T: Tensor | None) -> Tensor:
    """The load-balancing loss of one layer, ``E · Σ share·probability`` over real tokens.

    Source: Switch Transformer, arXiv 2101.03961, section 2.2, with shares of the T·K slots in place of the tokens.
    """
    tokens, experts = probabilities_TE.shape
    weight_T = probabilities_TE.new_ones(tokens) if real_T is None else real_T.to(probabilities_TE.dtype)
    count = weight_T.sum().clamp(min=1)
    slots_TE = F.one_hot(chosen_TK, experts).sum(1)
    share_E = (slots_TE * weight_T[:, None]).sum(0) / (count * chosen_TK.shape[1])
    probability_E = (probabilities_TE * weight_T[:, None]).sum(0) / count
    return experts * (share_E * probability_E).sum()


class SparseFeedForward(nn.Module):
    """Experts with a router, which sends each token to its ``top_k`` most probable experts.

    Experts have no capacity limit, so no token is dropped. The weights of a token's experts add up to one, so the
    output of equal experts is that of the dense block, an ``nn.Sequential`` that each of them copies.
    """

    def __init__(self, dense: Any, experts: int, top_k: int, name: str, routing: Routing) -> None:
        super().__init__()
        weight = dense.up.weight
        # The router's weights are drawn on the CPU, and no other number is, so they do not depend on the device.
        self.router = skip_init(
            nn.Linear, weight.shape[1], experts, bias=False, device=weight.device, dtype=weight.dtype
        )
        with torch.no_grad():
            self.router.weight.copy_(torch.randn(self.router.weight.shape) * _ROUTER_STD)
        self.router.weight.requires_grad_(weight.requires_grad)
        self.experts = nn.ModuleList(copy.deepcopy(dense) for _ in range(experts))
        self.top_k, self.name, self.routing = top_k, name, routing

    @torch.compiler.disable  # its shapes depend on the data, so it would be recompiled repeatedly
    def forward(self, hidden: Tensor) -> Tensor:
        """Map ``hidden`` (…, H) to (…, H), in the dtype of the dense block's output."""
        x_TH = hidden.reshape(-1, hidden.shape[-1])
        with torch.autocast(hidden.device.type, enabled=False):  # a softmax of 16-bit logits would flip choices
            probabilities_TE = F.linear(x_TH.float(), self.router.weight.float()).softmax(-1)
            top_TK, chosen_TK = probabilities_TE.topk(self.top_k)
            weights_TK = top_TK / top_TK.sum(-1, keepdim=True)
        if self.training and self.routing.noted is not None and probabilities_TE.requires_grad:
            self.routing.noted[self.name] = probabilities_TE, chosen_TK, hidden.shape[:-1]
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
    return [m for m in model.modules() if isinstance(m, SparseFeedForward)]


def upcycle(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], *, experts: int, every: int, top_k: int
) -> None:
    """Replace layers ``every``, ``2·every``, … (counted from 1) by experts, which are copies of the layer and join the
    optimizers' groups of the weights that they replace; ValueError if there is none, or other experts are there.

    A model that already has these experts is not changed. Its config has the settings as ``sparse_upcycling``.
    """
    outermost = next(iter(outermost_models(model).values()), None)
    if outermost is None:
        raise ValueError("the model has no Hugging Face model whose feed-forward layers could be replaced by experts")
    if getattr(outermost.config, "chunk_size_feed_forward", 0):
        raise ValueError("experts need all tokens of a layer at once; set the model's chunk_size_feed_forward to 0")
    encoder: Any = outermost.base_model
    settings = {"experts": experts, "every": every, "top_k": top_k}
    if sparse_layers(model):
        if encoder.config.sparse_upcycling != settings:
            had = encoder.config.sparse_upcycling
            raise ValueError(f"the model already has layers of experts with {had}; build a new model")
        return
    family = family_of(type(encoder))
    layouts = {known.feed_forward for known in ([family] if family else families())} - {None}
    modules = dict(model.named_modules(remove_duplicate=False))
    blocks = [
        (name, [f"{name}.{path}" for path in layout])
        for name in modules
        for layout in layouts
        if layout is not None and all(f"{name}.{path}" in modules for path in layout)
    ]
    if not blocks[every - 1 :: every]:
        known = family_titles(lambda family: family.feed_forward)
        raise ValueError(f"the model has {len(blocks)} feed-forward layers like those of {known}, and every={every}")
    routing = Routing()
    replaced: dict[nn.Parameter, list[nn.Parameter]] = {}
    for name, paths in blocks[every - 1 :: every]:
        dense: Any = nn.Sequential(OrderedDict(zip(_PARTS, (modules[path] for path in paths), strict=True)))
        sparse = SparseFeedForward(dense, experts, top_k, name, routing).train(dense.up.training)
        # Identities replace the rest, so the layer's forward is unchanged: its dropout, residual and LayerNorm.
        for path, new in zip(paths, (sparse, nn.Identity(), nn.Identity()), strict=True):
            model.set_submodule(path, new)
        for key, old in dense.named_parameters():
            replaced[old] = [expert.get_parameter(key) for expert in sparse.experts]
        replaced[dense.up.weight].append(sparse.router.weight)
    encoder.register_forward_pre_hook(routing.begin, with_kwargs=True)
    encoder.config.sparse_upcycling = settings
    replace_parameters(optimizers, replaced, {p: n for n, p in model.named_parameters()})


def load_sparse_upcycling(folder: str | Path, auto: Any = AutoModelForSequenceClassification) -> PreTrainedModel:
    """Load a model with experts from a folder that ``save_pretrained`` or train.py wrote.

    transformers' ``from_pretrained`` would not find weights for the layers that were replaced by experts.

    Args:
        folder: A local folder with a config.json, which has the settings, and safetensors files.
        auto: The auto class of the model's task. Default AutoModelForSequenceClassification.

    Returns:
        The model in eval mode, on the CPU, in the dtype of its weights.

    Raises:
        ValueError: The folder does not have a model with experts, or lacks some of its weights.
    """
    config = pretrained_config(str(folder))
    settings = getattr(config, "sparse_upcycling", None)
    if settings is None:
        raise ValueError(f"{folder} does not have an exported model with experts; load it with from_pretrained")
    with torch.random.fork_rng(devices=[]):  # the drawn weights are overwritten below
        model: PreTrainedModel = auto.from_config(config)
        upcycle(model, (), **settings)
    files = sorted(Path(folder).glob("*.safetensors"))
    weights = {name: weight for file in files for name, weight in load_file(file).items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    model.tie_weights()
    lacking = [name for name in missing if name not in model.all_tied_weights_keys] + list(unexpected)
    if lacking:
        raise ValueError(f"the weights in {folder} do not fit its config: {lacking[0]} and {len(lacking) - 1} more")
    return model.eval()

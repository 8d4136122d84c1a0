"""AdamW with its state and step on the CPU, for parameters on a GPU.

The idea is from torchao's CPUOffloadOptimizer, which does not work with Composer's Trainer. It copies gradients to the
CPU during the backward pass, hence before they are clipped, unscaled or averaged over ranks. It calls the closure,
which runs Composer's forward and backward pass, with gradients disabled. And its parameter groups and state have a
format that Composer can neither schedule nor save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

_CHUNK_BYTES = 2**24  # minimum size of a chunk: large enough to use the bus's bandwidth, small enough to overlap


class HostAdamW(Optimizer):
    """AdamW with its state in host memory; the update of one chunk overlaps with the copies of others.

    :meth:`step` copies the complete gradients and the weights to the CPU, and the new weights back. It does not cache
    weights between steps, so weights that were loaded or changed in between are used.

    Args:
        groups: Parameter groups with ``params``, ``lr``, ``betas``, ``eps`` and ``weight_decay``.

    Attributes:
        copied_bytes: Size of the weights and gradients that the last step copied to the CPU.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2})
        self.copied_bytes = 0
        self._buffers: dict[Tensor, tuple[Tensor, Tensor]] = {}  # weight and gradient on the host
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self.register_load_state_dict_post_hook(_to_host)  # torch moves a loaded state to its parameters' device

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter with a gradient; the copies of the new weights may still run when it returns."""
        loss = None if closure is None else closure()  # with gradients enabled, by swap_optimizer's hook
        for removed in self._buffers.keys() - self.state.keys():  # such as those of layers that were frozen
            del self._buffers[removed]
        chunks = list(self._chunks())
        self.copied_bytes = 2 * sum(p.nbytes for _, chunk in chunks for p in chunk)
        for stream in {self._stream(chunk[0].device) for _, chunk in chunks}:
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream(stream.device))
        arrived = [self._fetch(chunk) for _, chunk in chunks]
        for (group, chunk), event in zip(chunks, arrived, strict=True):
            if event is not None:
                event.synchronize()
            self._update(group, chunk)
            self._send(chunk)
        for stream in self._streams.values():
            torch.cuda.current_stream(stream.device).wait_stream(stream)
        return loss

    def _chunks(self) -> Iterator[tuple[dict[str, Any], list[Tensor]]]:
        """Chunks of at least 16 MiB of parameters with gradients.

        A chunk is smaller if the parameter group ends or the next parameter is on another device.
        """
        for group in self.param_groups:
            chunk: list[Tensor] = []
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                full = sum(p.nbytes for p in chunk) >= _CHUNK_BYTES
                if chunk and (full or chunk[0].device != parameter.device):
                    yield group, chunk
                    chunk = []
                chunk.append(parameter)
            if chunk:
                yield group, chunk

    def _stream(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type != "cuda":
            return None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams[device]

    def _fetch(self, chunk: list[Tensor]) -> torch.cuda.Event | None:
        stream = self._stream(chunk[0].device)
        with torch.cuda.stream(stream):  # for None, it changes nothing
            for parameter in chunk:
                assert parameter.grad is not None
                for host, source in zip(self._host(parameter), (parameter, parameter.grad), strict=True):
                    host.copy_(source, non_blocking=True)
            return stream.record_event() if stream else None

    def _host(self, parameter: Tensor) -> tuple[Tensor, Tensor]:
        if parameter not in self._buffers:
            pinned = parameter.device.type == "cuda"  # only copies of pinned memory overlap with the CPU's work
            weight, gradient = (torch.empty_like(parameter, device="cpu", pin_memory=pinned) for _ in range(2))
            self._buffers[parameter] = weight, gradient
        return self._buffers[parameter]

    def _update(self, group: dict[str, Any], chunk: list[Tensor]) -> None:
        hosts = [self._host(parameter) for parameter in chunk]
        states = [self.state[parameter] for parameter in chunk]
        for (weight, _), state in zip(hosts, states, strict=True):
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        adamw(
            [weight for weight, _ in hosts],
            [gradient for _, gradient in hosts],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def _send(self, chunk: list[Tensor]) -> None:
        stream = self._stream(chunk[0].device)
        with torch.cuda.stream(stream):  # for None, it changes nothing
            for parameter in chunk:
                parameter.copy_(self._host(parameter)[0], non_blocking=True)


def _to_host(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor):
                state[key] = value.cpu()

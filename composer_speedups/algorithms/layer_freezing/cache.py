"""Cache the frozen blocks' outputs for all training samples, so that training steps start after these blocks.

The outputs are computed once, before the first batch, in the order of the dataset and in batches of a fixed size. A
resumed run therefore computes the same values.

Shapes: N samples, T packed tokens of a batch, H hidden units.
"""

from __future__ import annotations

import zlib
from typing import Any, NoReturn

import numpy as np
import psutil
import torch
from composer.core import get_precision_context
from torch import Tensor

from composer_speedups.core.errors import Refusal
from composer_speedups.core.run import Run
from composer_speedups.families.blocks import blocks_of, only_encoder
from composer_speedups.kernels.common import autocast_dtype
from composer_speedups.packing.call import KnownBatch, Prefix
from composer_speedups.packing.encoder import with_counted_rows
from composer_speedups.packing.rows import ROW_INDICES, IndexedRows, as_numpy, count_rows

_MOST_ROWS = 128  # of one forward pass, or those of the training batches, if they have fewer
_CHANGED = "the collator returns other tokens at each call, as for masked LM or with augmentation"


def _refuse(reason: str, fix: str) -> NoReturn:
    raise Refusal("layer_freezing", f"cache: {reason}", f"{fix}, or remove cache")


class PrefixCache:
    """The outputs of the last of ``blocks`` frozen blocks for all training samples of a run whose encoder is unpadded.

    They are packed, and in autocast's dtype; on the GPU if they take at most half of its free memory, otherwise in
    pinned memory. Refusal if the batches do not say which samples they have, if some cannot be packed or change, or if
    the outputs take more than half of the free memory.
    """

    def __init__(self, run: Run, blocks: int) -> None:
        state: Any = run.state
        loader: Any = state.train_dataloader
        self._run, self._blocks = run, blocks
        self._encoder: Any = only_encoder(run.model)
        self._data: Any = getattr(loader, "dataset", None)
        if not isinstance(self._data, IndexedRows):
            fix = "in code, build the DataLoader from IndexedRows; in a YAML, read samples that are not streamed"
            _refuse("the batches do not say which samples they have", fix)
        rows = min(_MOST_ROWS, getattr(loader, "batch_size", None) or _MOST_ROWS)
        self._chunks = [range(n, min(n + rows, len(self._data))) for n in range(0, len(self._data), rows)]
        read = [self._read(chunk)[1:] for chunk in self._chunks]
        self._lengths_N = np.concatenate([lengths for lengths, _ in read])
        self._checksums = [checksum for _, checksum in read]
        self._precision = lambda: get_precision_context(state.precision, state.precision_config)
        self._values, self._where = self._allocate()
        self._samples = self._values.split(self._lengths_N.tolist())
        self._dtype = self._values.dtype

    def __str__(self) -> str:
        return f"{self._values.nbytes / 2**30:.3g} GiB {self._where}"

    def _read(self, chunk: range) -> tuple[dict[str, Any], Any, int]:
        """A batch of consecutive samples, each sample's number of real tokens, and a checksum of the model's inputs."""
        batch = self._data.collate(self._data.__getitems__(chunk))
        del batch[ROW_INDICES]
        counted = [lengths.numpy() for lengths in count_rows(batch, [self._encoder.packing.rules]).values()]
        if len(counted) != 1:
            _refuse(f"a batch has {len(counted)} attention masks instead of one", "give it one, on the CPU")
        if counted[0].min() < 0:
            _refuse("unpadding keeps some rows padded", "pad on the right, without holes")
        checksum = 0
        for name in sorted(name for name, value in batch.items() if isinstance(value, Tensor) and name != "labels"):
            checksum = zlib.adler32(as_numpy(batch[name]).tobytes(), checksum)
        return batch, counted[0].reshape(len(chunk), -1).sum(-1), checksum

    def _allocate(self) -> tuple[Tensor, str]:
        device, dtype = self._run.device, next(self._encoder.parameters()).dtype
        with self._precision():
            dtype = autocast_dtype(device.type, dtype)
        shape = int(self._lengths_N.sum()), self._encoder.packing.config.hidden_size
        size = shape[0] * shape[1] * dtype.itemsize
        if (on_gpu := device.type == "cuda") and size <= torch.cuda.mem_get_info(device)[0] // 2:
            return torch.empty(shape, dtype=dtype, device=device), "on the GPU"
        if size > psutil.virtual_memory().available // 2:
            _refuse(f"the outputs of {shape[0]:,} tokens take {size / 2**30:,.0f} GiB", "train on fewer samples")
        return torch.empty(shape, dtype=dtype, pin_memory=on_gpu), f"in {'pinned ' * on_gpu}host memory"

    @torch.no_grad()
    def fill(self) -> None:
        """Run the frozen blocks on all samples, without dropout, and wait for the GPU."""
        model, last = self._run.model, blocks_of(self._encoder)[self._blocks - 1]
        training, hook = model.training, last.register_forward_hook(_stop)
        model.eval()
        start = 0
        try:
            with self._precision():
                for chunk, checksum in zip(self._chunks, self._checksums, strict=True):
                    batch, lengths, again = self._read(chunk)
                    if again != checksum:
                        _refuse(_CHANGED, "make it return the same")
                    tokens = int(lengths.sum())
                    self._values[start : start + tokens].copy_(self._hidden(batch)[:tokens], non_blocking=True)
                    start += tokens
        finally:
            hook.remove()
            model.train(training)
        if self._run.device.type == "cuda":
            torch.cuda.synchronize(self._run.device)

    def _hidden(self, batch: dict[str, Any]) -> Tensor:
        """The last frozen block's output, (T, H)."""
        state: Any = self._run.state
        moved = state.device.batch_to_device(batch)
        try:
            with with_counted_rows(self._run.model, batch, moved):
                self._run.model(moved)
        except _Stopped as stopped:
            if len(stopped.hidden) == 1:
                self._dtype = stopped.hidden.dtype
                return stopped.hidden[0]
        _refuse("the forward pass does not run the encoder on packed tokens", "request no hidden states or attentions")

    def give(self, known: KnownBatch) -> KnownBatch:
        """Attach the packed outputs to the counts of a training batch; Refusal if the batch differs from the data."""
        if known.indices is None or len(known.rows) != 1:
            _refuse("a micro-batch does not say which samples it has", "keep all entries in a split_batch of your own")
        (rows,), (lengths,), chosen = known.rows, known.lengths, known.indices.numpy()
        sizes = lengths.numpy().reshape(len(chosen), -1).sum(-1)
        real = chosen < len(self._samples)  # other rows are filler, whose result is not used
        if rows.packed is None or (sizes[real] != self._lengths_N[chosen[real]]).any():
            _refuse("samples have other lengths in a batch than before", "remove what changes the batches")
        used = int(sizes.sum())
        hidden = torch.empty(len(rows.packed), self._values.shape[1], dtype=self._dtype, device=rows.values.device)
        hidden[used:].zero_()
        parts = [
            self._samples[index] if index < len(self._samples) else self._values[:size]
            for index, size in zip(chosen.tolist(), sizes.tolist(), strict=True)
        ]
        torch._foreach_copy_(hidden[:used].split(sizes.tolist()), parts, non_blocking=True)
        return known._replace(rows=(rows._replace(prefix=Prefix(hidden.unsqueeze(0), self._blocks)),))


class _Stopped(Exception):
    """Ends a forward pass behind a block."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


def _stop(module: Any, args: Any, output: Any) -> NoReturn:
    raise _Stopped(output[0] if isinstance(output, tuple) else output)

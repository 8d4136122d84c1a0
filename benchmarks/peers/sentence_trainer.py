"""python -m benchmarks.peers.sentence_trainer -f FILE [key=value ...] [peer.NAME=VALUE ...]: embeddings with
sentence-transformers' Trainer and its MultipleNegativesRankingLoss.

The job is that of a config with ``model.task=embedding`` and the ranking loss: the same samples in the same order,
tokens, batch size, initial weights, dropout, pooling, temperature, AdamW settings, learning rate of every batch and
clipping. As in sentence-transformers, each column of texts is encoded by a call of its own; with
``data.padding=longest``, it is padded to its own longest text. The loss does not exclude false negatives. Texts are
tokenized ahead of training. ``algorithms`` and ``trainer.precision`` are ignored; instead there are

- the fastest flags and ``peer.attention``, as in :mod:`.hf_trainer`.
- ``peer.flatten``: true for sentence-transformers' unpadded inputs: a column's texts are one row without padding, and
  each is pooled from its own tokens. Default false. Attention is torch's variable-length flash attention, which has
  dropout; on a CPU, it runs text by text. The model must be a BertModel.
- ``peer.multiple``: with ``peer.flatten``, round the tokens of a row up to a multiple of it. Matmuls are slow at odd
  numbers. Default 1: no rounding, as in sentence-transformers.
- ``peer.unsloth``: true for Unsloth's unpadding (its ``use_unpadding=True``): the encoder's layers run on real tokens;
  embeddings and pooling are padded. Default false. Needs a GPU, the packages unsloth and xformers, a BertModel or
  RobertaModel, ``model.pooling=mean`` and ``peer.torch_compile=false``.
- ``peer.NAME`` for every other name: a field of SentenceTransformerTrainingArguments.

It trains only: a config with evaluation data is refused. Writes report.json like train.py.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers import __version__ as installed
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertModel

from benchmarks.peers.flattened_loop import ATTENTION, register_attention, varlen_attention
from benchmarks.peers.job import Job, build_job, plan_of, set_attention
from benchmarks.peers.job_trainer import JobTrainer, meter_of, read_flags, training_arguments
from composer_speedups.core.errors import ConfigError, first_line
from composer_speedups.core.settings import Settings
from composer_speedups.tasks.embedding import Embedding
from composer_speedups.train.cli import exit_codes
from composer_speedups.train.config.schema import Config
from composer_speedups.train.run_folder import RunFolder


class Flags(Settings):
    attention: str = "sdpa"
    flatten: bool = False
    multiple: int = Field(1, ge=1)
    unsloth: bool = False


def main(arguments: list[str]) -> None:
    config, own, flags, on_gpu = read_flags(arguments, Flags)
    with RunFolder(config) as folder:
        job = build_job(config, on_gpu=on_gpu)
        task = job.model.task
        if not isinstance(task, Embedding) or task.loss_name != "ranking":
            raise ConfigError("model.task: this peer trains embeddings with model.loss=ranking only")
        if job.eval is not None:
            raise ConfigError("data.eval_file: this peer does not evaluate; set data.eval_file=null")
        plan = plan_of(config, len(job.train))
        args = training_arguments(
            SentenceTransformerTrainingArguments, config, plan, flags, on_gpu=on_gpu, folder=folder.path
        )
        if own.unsloth and args.torch_compile:
            raise ConfigError("peer.unsloth: Unsloth does not unpad a compiled model; set peer.torch_compile=false")
        meter = meter_of(config, job, args, on_gpu=on_gpu)
        if own.flatten:
            if type(job.model.model) is not BertModel:
                raise ConfigError(f"peer.flatten: supports BertModel only, not {type(job.model.model).__name__}")
            own.attention = ATTENTION
            register_attention(varlen_attention)
            if on_gpu:
                torch.set_num_threads(1)  # waking threads takes longer than flattening a batch
        set_attention(job.model, own.attention)
        encoder = _encoder(job, config)
        if own.flatten:
            accept_flat_rows(encoder)
        if own.unsloth:
            _unpad_with_unsloth(encoder)
        loss = MultipleNegativesRankingLoss(encoder, scale=1 / task.temperature)
        trainer = _Peer(job, flags=own, plan=plan, meter=meter, config=config, model=encoder, args=args, loss=loss)
        trainer.run(folder, "sentence_trainer", own.model_dump())


def _encoder(job: Job, config: Config) -> SentenceTransformer:
    """sentence-transformers' model with the job's own transformers model inside."""
    task: Any = job.model.task
    tokenizer: Any = job.model.tokenizer
    with tempfile.TemporaryDirectory() as name:
        job.model.model.save_pretrained(name)
        tokenizer.save_pretrained(name)
        task.export(Path(name), job.model.model.config.hidden_size, config.data.max_length)
        arguments = task.model_arguments(type(job.model.model))  # no pooler
        encoder = SentenceTransformer(name, device="cpu", model_kwargs=arguments)
    encoder[0].model = job.model.model
    if {*encoder.parameters()} != {*job.model.model.parameters()}:
        raise RuntimeError("sentence-transformers keeps its model elsewhere; sentence_trainer needs 6.0 or newer")
    return encoder


def accept_flat_rows(encoder: SentenceTransformer) -> None:
    """Let the model accept the inputs of :func:`flat_row`, and pool only real tokens."""
    transformer: Any = encoder[0]
    if transformer.model_forward_params is not None:
        transformer.model_forward_params |= {"position_ids", "starts", "longest"}
    encoder.insert(1, _RealTokens())


class _RealTokens(nn.Module):
    """Removes the unused tokens at the end of a row, before sentence-transformers pools the others."""

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        features["token_embeddings"] = features["token_embeddings"][:, : features["seq_idx"].shape[1]]
        return features


def _unpad_with_unsloth(encoder: SentenceTransformer) -> None:
    """Patch the model as Unsloth's ``FastSentenceTransformer`` does with ``use_unpadding=True``."""
    try:
        from unsloth.models._sentence_transformer_unpadding import enable_sentence_transformer_unpadding
    except (ImportError, NotImplementedError) as error:  # the latter without a GPU
        raise ConfigError(f"peer.unsloth: Unsloth cannot be imported ({first_line(error)})") from error
    if not enable_sentence_transformer_unpadding(encoder):
        needs = "BertModel or RobertaModel, model.pooling=mean, peer.attention=sdpa, and xformers or flash-attn"
        raise ConfigError(f"peer.unsloth: Unsloth does not unpad this model here; it needs {needs}")


class _Peer(JobTrainer, SentenceTransformerTrainer):
    """sentence-transformers' Trainer on a job."""

    def __init__(self, job: Job, *, flags: Flags, **kwargs: Any) -> None:
        self._flags = flags
        self._rows_in_calls: list[int] = []  # of the encoder; 1 if the texts are one row
        if flags.unsloth:
            model: Any = job.model.model
            model.encoder.layer[0].register_forward_pre_hook(self._note_rows)
        super().__init__(job, **kwargs)

    def _note_rows(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._rows_in_calls.append(len(inputs[0]))

    def inputs_of(self, batch: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """Turn tokens (R, N, S) into N texts' ``text_n_input_ids`` and ``text_n_attention_mask``, each (R, S), or into
        the inputs of :func:`flat_row`."""
        texts = zip(batch["input_ids"].unbind(1), batch["attention_mask"].unbind(1), strict=True)
        found: dict[str, Any] = {}
        for n, (ids, mask) in enumerate(texts):
            if self._flags.flatten:
                inputs = flat_row(ids, mask.bool(), self._flags.multiple)
            else:
                width = int(mask.sum(-1).max()) if self._config.data.padding == "longest" else mask.shape[1]
                inputs = {"input_ids": ids[:, :width], "attention_mask": mask[:, :width]}
            found |= {f"text_{n}_{name}": self._pinned(value) for name, value in inputs.items()}
        return found

    def _pinned(self, value: Any) -> Any:
        """A tensor in pinned memory, where the loader would put it, so that copying it does not wait for the GPU."""
        pin = self.args.dataloader_pin_memory and isinstance(value, Tensor)
        return value.contiguous().pin_memory() if pin else value

    def _evidence(self) -> dict[str, Any]:
        evidence = super()._evidence() | {"version": installed}
        if self._flags.unsloth:
            evidence["unpadded_calls"] = self._rows_in_calls.count(1)
            if not evidence["unpadded_calls"]:
                raise ConfigError("peer.unsloth: Unsloth unpadded no batch; it needs a GPU, bf16, and padded batches")
        return evidence


def flat_row(ids: Tensor, real: Tensor, multiple: int) -> dict[str, Any]:
    """Flatten a column's texts (R, S) on the CPU.

    Returns:
        As from the collator of sentence-transformers, with T real tokens: ``cu_seq_lens_q`` (R + 1) and ``seq_idx``
        (1, T), which its pooling reads; and ``input_ids`` and ``position_ids``, but with unused tokens at the end
        (1, T rounded up). For :func:`.varlen_attention`: ``starts``, to which the unused tokens are another text, and
        ``longest``, a bound on the tokens of a text.
    """
    ends = real.sum(-1).cumsum(0)
    total = int(ends[-1])
    unused = -total % multiple
    positions = torch.arange(real.shape[1]).expand_as(real)
    texts = torch.arange(len(real), dtype=torch.int32)[:, None].expand_as(real)
    cu_seq_lens = F.pad(ends, (1, 0)).to(torch.int32)
    return {
        "input_ids": F.pad(ids[real][None], (0, unused)),
        "position_ids": F.pad(positions[real][None], (0, unused)),
        "seq_idx": texts[real][None],
        "cu_seq_lens_q": cu_seq_lens,
        "starts": cu_seq_lens if multiple == 1 else F.pad(cu_seq_lens, (0, 1), value=total + unused),
        "longest": max(real.shape[1], multiple),
    }


if __name__ == "__main__":
    with exit_codes():
        main(sys.argv[1:])

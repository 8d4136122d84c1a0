"""python -m benchmarks.peers.sentence_trainer -f FILE [key=value ...] [peer.NAME=VALUE ...]: embeddings with
sentence-transformers' Trainer and its MultipleNegativesRankingLoss.

The job is that of a config with ``model.task=embedding`` and the ranking loss: the same samples in the same order,
tokens, batch size, initial weights, dropout, pooling, temperature, AdamW settings, learning rate of every batch and
clipping. As in sentence-transformers, each column of texts is encoded by a call of its own; with
``data.padding=longest``, it is padded to its own longest text. The loss does not exclude false negatives. Texts are
tokenized ahead of training. ``algorithms`` and ``trainer.precision`` are ignored; instead there are

- ``peer.preset`` and ``peer.attention``: as in :mod:`.hf_trainer`.
- ``peer.flatten``: true for flattened inputs, which sentence-transformers 6 pools without padding, with torch's
  variable-length flash attention, which has dropout; default false. The model must be BERT's.
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
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import MultipleNegativesRankingLoss
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from benchmarks.peers.flattened_loop import ATTENTION, varlen_attention
from benchmarks.peers.job import Job, build_job, plan_of, set_attention
from benchmarks.peers.job_trainer import JobTrainer, meter_of, read_flags, training_arguments
from composer_speedups.core.errors import ConfigError
from composer_speedups.tasks.embedding import Embedding
from composer_speedups.train.cli import exit_codes
from composer_speedups.train.config.schema import Config
from composer_speedups.train.run_folder import RunFolder

_OWN_FLAGS: dict[str, Any] = {"preset": "best", "attention": "sdpa", "flatten": False}
_FLAT = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")  # named as in transformers


def main(arguments: list[str]) -> None:
    config, own, flags, on_gpu = read_flags(arguments, _OWN_FLAGS)
    with RunFolder(config) as folder:
        job = build_job(config, on_gpu=on_gpu)
        task = job.model.task
        if not isinstance(task, Embedding) or task.loss_name != "ranking":
            raise ConfigError("model.task: this peer trains embeddings with model.loss=ranking only")
        if job.eval is not None:
            raise ConfigError("data.eval_file: this peer does not evaluate; set data.eval_file=null")
        plan = plan_of(config, len(job.train))
        args = training_arguments(
            SentenceTransformerTrainingArguments,
            config,
            plan,
            own["preset"],
            flags,
            own=_OWN_FLAGS,
            on_gpu=on_gpu,
            folder=folder.path,
        )
        meter = meter_of(config, job, args, on_gpu=on_gpu)
        if own["flatten"]:
            own["attention"] = ATTENTION
            AttentionInterface.register(ATTENTION, _flat_attention)
            AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)
        set_attention(job.model, own["attention"])
        encoder = _encoder(job, config)
        transformer: Any = encoder[0]
        if own["flatten"] and transformer.model_forward_params is not None:
            transformer.model_forward_params |= {*_FLAT, "position_ids"}
        trainer = _Peer(
            job,
            flatten=own["flatten"],
            plan=plan,
            meter=meter,
            config=config,
            model=encoder,
            args=args,
            loss=MultipleNegativesRankingLoss(encoder, scale=1 / task.temperature),
        )
        trainer.run(folder, "sentence_trainer", own)


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


class _Peer(JobTrainer, SentenceTransformerTrainer):
    """sentence-transformers' Trainer on a job."""

    def __init__(self, *args: Any, flatten: bool, **kwargs: Any) -> None:
        self._flatten = flatten
        super().__init__(*args, **kwargs)

    def inputs_of(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Turn tokens (R, N, S) into N texts' ``text_n_input_ids`` and ``text_n_attention_mask``, each (R, S)."""
        texts = zip(batch["input_ids"].unbind(1), batch["attention_mask"].unbind(1), strict=True)
        found: dict[str, Tensor] = {}
        for n, (ids, mask) in enumerate(texts):
            if self._flatten:
                found |= {f"text_{n}_{name}": value for name, value in _flat(ids, mask.bool()).items()}
                continue
            width = int(mask.sum(-1).max()) if self._config.data.padding == "longest" else mask.shape[1]
            found |= {f"text_{n}_input_ids": ids[:, :width], f"text_{n}_attention_mask": mask[:, :width]}
        return found


def _flat(ids: Tensor, real: Tensor) -> dict[str, Any]:
    """Return tokens (R, S) as one row, as DataCollatorWithFlattening of transformers does."""
    starts = torch.nn.functional.pad(real.sum(-1).cumsum(0), (1, 0)).to(torch.int32)
    positions = torch.arange(real.shape[1]).expand_as(real)
    longest = int(starts.diff().max())
    row = {"input_ids": ids[real][None], "position_ids": positions[real][None]}
    return row | dict(zip(_FLAT, (starts, starts, longest, longest), strict=True))


def _flat_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None,
    *,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    dropout: float = 0.0,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    return varlen_attention(module, query, key, value, mask, dropout, scaling, cu_seq_lens_q, max_length_q)


if __name__ == "__main__":
    with exit_codes():
        main(sys.argv[1:])

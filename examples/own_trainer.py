"""Train on several GPUs with your own Composer Trainer, the recommended techniques and train.py's data parallelism.

On a CPU, the recommended techniques stop it; --on-unavailable warn trains without those that need a GPU.

    composer -n 2 examples/own_trainer.py                          # BERT-base with random weights, random tokens
    composer -n 2 examples/own_trainer.py --model FOLDER --lengths lengths.txt --batch-size 128 --duration 200ba

The last line of the output is a JSON object with the steady-state rates of all ranks together.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path

import numpy as np
import torch
from composer import Trainer
from composer.core import DataSpec
from composer.devices import DeviceCPU, DeviceGPU
from composer.models import HuggingFaceModel
from composer.utils import dist, reproducibility
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

from composer_speedups import BalancedSampler, OverlappedDDP, ThroughputMonitor, recommended, share_cores

SIZES = {
    "tiny": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    "base": {},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
}


class RandomSamples(Dataset):
    """Samples of random token ids with given lengths, and random labels. ``__getitems__`` pads a batch to ``width``."""

    def __init__(self, lengths: np.ndarray, vocabulary: int, width: int, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self.lengths, self.width = lengths, width
        self.starts = np.concatenate([[0], np.cumsum(lengths)])
        self.ids = generator.integers(1000 % vocabulary, vocabulary, self.starts[-1])
        self.labels = generator.integers(0, 2, len(lengths))

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitems__(self, rows: list[int]) -> dict[str, torch.Tensor]:
        mask = np.arange(self.width) < self.lengths[rows][:, None]
        ids = np.zeros(mask.shape, dtype=np.int64)
        ids[mask] = np.concatenate([self.ids[self.starts[row] : self.starts[row + 1]] for row in rows])
        batch = {"input_ids": ids, "attention_mask": mask.astype(np.int64), "labels": self.labels[rows]}
        return {name: torch.from_numpy(array) for name, array in batch.items()}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a transformers model (default: random weights)")
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--lengths", type=Path, help="file with the number of tokens of each sample, one per line")
    parser.add_argument("--samples", type=int, default=8000, help="number of samples without --lengths (default: 8000)")
    parser.add_argument("--max-length", type=int, default=256, help="tokens that a sample is truncated and padded to")
    parser.add_argument("--batch-size", type=int, default=128, help="samples per rank and step (default: 128)")
    parser.add_argument("--duration", default="2ep", help="Composer's max_duration (default: 2ep)")
    parser.add_argument(
        "--dropout", type=float, default=0.1, help="dropout of a model with random weights (default: 0.1)"
    )
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--on-unavailable", choices=("stop", "warn"), default="stop", help="use warn to train on a CPU")
    parser.add_argument("--plain", action="store_true", help="use Composer's own DDP and sampler, for comparison")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    ranks, on_gpu = dist.get_world_size(), torch.cuda.is_available()
    reproducibility.seed_all(given.seed)
    if given.model:
        model = AutoModelForSequenceClassification.from_pretrained(
            given.model, num_labels=2, dtype=torch.float32, trust_remote_code=False
        )  # without dtype, weights that were stored in 16 bits would be trained in 16 bits
    else:
        dropout = {"hidden_dropout_prob": given.dropout, "attention_probs_dropout_prob": given.dropout}
        model = BertForSequenceClassification(BertConfig(**SIZES[given.size], **dropout))
    if given.lengths:
        lengths = np.loadtxt(given.lengths, dtype=np.int64)
    else:  # similar to IMDB
        lengths = np.random.default_rng(given.seed).lognormal(5.3, 0.6, given.samples).astype(np.int64) + 3
    data = RandomSamples(np.minimum(lengths, given.max_length), model.config.vocab_size, given.max_length, given.seed)

    if given.plain:
        sampler = dist.get_sampler(data, drop_last=True, shuffle=True)
        callbacks = []
    else:
        share_cores(computes=not on_gpu)
        sampler = BalancedSampler(
            data.lengths,
            given.batch_size * ranks,
            ranks=ranks,
            rank=dist.get_global_rank(),
            seed=given.seed,
            drop_last=True,
        )
        gc.freeze()  # a full collection of the imports' objects takes 0.4 s in some step, while all other ranks wait
        callbacks = [OverlappedDDP()]
    loader = DataLoader(
        data,
        batch_size=given.batch_size,
        sampler=sampler,
        collate_fn=lambda batch: batch,  # the dataset returns whole batches
        drop_last=True,
        pin_memory=on_gpu,
    )
    trainer = Trainer(
        model=HuggingFaceModel(model, use_logits=True),
        train_dataloader=DataSpec(loader, get_num_tokens_in_batch=lambda batch: int(batch["attention_mask"].sum())),
        max_duration=given.duration,
        optimizers=torch.optim.AdamW(model.parameters(), lr=given.lr, weight_decay=0.01),
        algorithms=recommended(given.on_unavailable),
        callbacks=[*callbacks, monitor := ThroughputMonitor()],
        device=DeviceGPU(allow_tf32=False) if on_gpu else DeviceCPU(),
        precision="fp32",  # the mixed_precision technique sets bf16
        seed=given.seed,
        progress_bar=False,
    )
    trainer.fit()
    measured = monitor.summary()
    sums = getattr(trainer.state.model, "gradient_sums", None)  # set by OverlappedDDP
    result = {
        "ranks": ranks,
        "batch_size_per_rank": given.batch_size,
        "batches": trainer.state.timestamp.batch.value,
        **{name: measured.get(name) for name in ("samples_per_sec", "tokens_per_sec", "mfu", "warmup_seconds")},
        "loss": trainer.state.total_loss_dict["loss/train/total"],
        "techniques": {t.name: {"engaged": t.engaged, **t.evidence} for t in trainer.state.algorithms},
        "ddp": sums.summary() if sums else None,
        "gpu": torch.cuda.get_device_name() if on_gpu else None,
    }
    trainer.close()
    if dist.get_global_rank() == 0:
        print(json.dumps(result, default=str), flush=True)


if __name__ == "__main__":
    main()

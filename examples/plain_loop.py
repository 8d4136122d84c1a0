"""Train with a plain PyTorch loop; one call adds unpadding and fused layers to the model.

python examples/plain_loop.py                      # a small BERT with random weights, on built-in film reviews
python examples/plain_loop.py --model FOLDER       # a transformers model and tokenizer: a folder or hub id
python examples/plain_loop.py --stock              # the same, with the unchanged transformers model
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, BertConfig

from composer_speedups import apply_recommended, with_row_lengths
from composer_speedups.data.builtin import builtin_reviews
from composer_speedups.data.tokens import load_tokenizer
from composer_speedups.tasks.settings import DataConfig


def main(arguments: list[str] | None = None) -> list[float]:
    """Train for one epoch; return the loss of each batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub id; default: random weights")
    parser.add_argument("--samples", type=int, default=6400)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--stock", action="store_true", help="do not change the model")
    args = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    reviews = builtin_reviews(args.samples, seed=17, split="train", length_scale=0.3)
    config = DataConfig(tokenizer=None if args.model else "wordpiece", vocab_size=1000)
    tokenizer = load_tokenizer(config, args.model or "", reviews["text"])
    torch.manual_seed(0)
    if args.model:
        model = AutoModelForSequenceClassification.from_pretrained(
            args.model, num_labels=2, dtype=torch.float32, trust_remote_code=False
        )  # without dtype, weights that were stored in 16 bits would be trained in 16 bits
    else:
        small = BertConfig(
            vocab_size=1000, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, intermediate_size=512,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        model = AutoModelForSequenceClassification.from_config(small)
    model.to(device).train()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    rows = list(zip(reviews["text"], reviews["label"], strict=True))

    def collate(batch: list[tuple[str, int]]) -> dict[str, torch.Tensor]:
        texts, labels = zip(*batch, strict=True)
        encoded = tokenizer(list(texts), padding=True, truncation=True, max_length=256, return_tensors="pt")
        return {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"],
                "labels": torch.tensor(labels)}  # fmt: skip

    collator: Any = collate
    if not args.stock:
        applied = apply_recommended(model)
        print(f"applied: {', '.join(applied.evidence)}")
        if "unpadding" in applied.evidence:
            # Counts each row's tokens on the CPU; without it each call waits for the GPU.
            collator = with_row_lengths(collate, model)

    losses, start = [], time.perf_counter()
    for batch in DataLoader(rows, batch_size=args.batch_size, collate_fn=collator):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(**{name: x.to(device) for name, x in batch.items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    values = [float(loss) for loss in losses]
    seconds, tenth = time.perf_counter() - start, max(1, len(values) // 10)
    first, last = (sum(part) / tenth for part in (values[:tenth], values[-tenth:]))
    print(f"{len(rows) / seconds:,.0f} samples/s; mean loss {first:.4f} at the start, {last:.4f} at the end")
    return values


if __name__ == "__main__":
    main()

"""Train with Hugging Face's Trainer; one call adds unpadding and fused layers to the model.

python examples/hf_trainer.py                      # a small BERT with random weights, on built-in film reviews
python examples/hf_trainer.py --model FOLDER       # a transformers model and tokenizer: a folder or hub id
python examples/hf_trainer.py --stock              # the same, with the unchanged transformers model
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

from composer_speedups import apply_recommended, with_row_lengths
from composer_speedups.data.builtin import builtin_reviews
from composer_speedups.data.tokens import load_tokenizer
from composer_speedups.tasks.settings import DataConfig


def main(arguments: list[str] | None = None) -> list[float]:
    """Train for one epoch; return the loss of each batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or hub id; default: random weights")
    parser.add_argument("--samples", type=int, default=640)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--stock", action="store_true", help="do not change the model")
    args = parser.parse_args(arguments)

    reviews = builtin_reviews(args.samples, seed=17, split="train", length_scale=0.3)
    config = DataConfig(tokenizer=None if args.model else "wordpiece", vocab_size=1000)
    tokenizer = load_tokenizer(config, args.model or "", reviews["text"])
    encoded = tokenizer(reviews["text"], truncation=True, max_length=256)
    columns = {"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}
    dataset = Dataset.from_dict({**columns, "labels": reviews["label"]})
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

    collate: Any = DataCollatorWithPadding(tokenizer)
    if not args.stock:
        applied = apply_recommended(model)
        print(f"applied: {', '.join(applied.evidence)}")
        if "unpadding" in applied.evidence:
            # Counts each row's tokens on the CPU; without it each call waits for the GPU.
            collate = with_row_lengths(collate, model)

    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=args.batch_size,
            num_train_epochs=1,
            learning_rate=1e-3,
            bf16=torch.cuda.is_available(),
            optim="adamw_torch_fused",
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(model=model, args=settings, train_dataset=dataset, data_collator=collate)
        result = trainer.train()
    print(f"{result.metrics['train_samples_per_second']:,.0f} samples/s")
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()

"""Train with sentence-transformers' Trainer; one call adds unpadding and fused layers to the model.

pip install sentence-transformers
python examples/sentence_transformers_trainer.py --model FOLDER    # a sentence-transformers or transformers model
python examples/sentence_transformers_trainer.py --stock           # with the unchanged model
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

from composer_speedups import apply_recommended
from composer_speedups.data.builtin import builtin_reviews
from composer_speedups.tasks.settings import resolve_name


def main(arguments: list[str] | None = None) -> list[float]:
    """Train for one epoch; return the loss of each batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="minilm", help="folder or hub id (default: minilm, from the minilm extra)")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--stock", action="store_true", help="do not change the model")
    args = parser.parse_args(arguments)

    dropout = {"hidden_dropout_prob": args.dropout, "attention_probs_dropout_prob": args.dropout}
    # without dtype, weights that were stored in 16 bits would be trained in 16 bits
    model = SentenceTransformer(resolve_name(args.model), config_kwargs=dropout, model_kwargs={"dtype": "float32"})
    if not args.stock:  # changes the transformers model inside; Pooling applies the attention mask
        print(f"applied: {', '.join(apply_recommended(model).evidence)}")

    # The two halves of a review are an anchor and its positive.
    texts = [
        text.split(". ") for text in builtin_reviews(args.samples, seed=17, split="train", length_scale=0.3)["text"]
    ]
    halves = [(parts[: len(parts) // 2] or parts, parts[len(parts) // 2 :]) for parts in texts]
    dataset = Dataset.from_dict(
        {"anchor": [". ".join(a) for a, _ in halves], "positive": [". ".join(b) for _, b in halves]}
    )
    with tempfile.TemporaryDirectory() as folder:
        settings = SentenceTransformerTrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=args.batch_size,
            num_train_epochs=1,
            bf16=torch.cuda.is_available(),
            logging_steps=1,
            report_to="none",
            disable_tqdm=True,
        )
        trainer = SentenceTransformerTrainer(
            model=model, args=settings, train_dataset=dataset, loss=MultipleNegativesRankingLoss(model)
        )
        result = trainer.train()
    print(f"{result.metrics['train_samples_per_second']:,.0f} samples/s")
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()

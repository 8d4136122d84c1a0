"""Generated samples: reproducible, at chance without training, and learned within seconds; and random tokens."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from composer_speedups.data.builtin import builtin_reviews, builtin_samples
from composer_speedups.data.loader import build_data
from composer_speedups.tasks.classification import Classification
from composer_speedups.tasks.settings import DataConfig
from tests.helpers.jobs import run
from tests.helpers.texts import tokenizer_of

# Task → digest of its samples; metric; upper bound with random weights; (batches, lower bound after so many batches).
TASKS: dict[str, tuple[str, str, float, tuple[int, float]]] = {
    "multilabel": ("43975422c6459e0c", "map", 0.4, (120, 0.43)),
    "regression": ("e5ecc30ad437a13c", "spearman", 0.2, (50, 0.4)),
    "token_classification": ("772e6be5992d1053", "entity_f1", 0.1, (60, 0.2)),
    "reranking": ("100710fbcd3d6190", "ndcg@10", 0.7, (110, 0.8)),
    "embedding": ("b22b5392b2f37738", "recall@1", 0.05, (40, 0.6)),
}


@pytest.mark.parametrize("task", TASKS)
def test_samples_are_reproducible_and_depend_on_seed_and_split(task: str) -> None:
    samples = builtin_samples(task, 50, 17, "train")
    assert hashlib.sha256(json.dumps(samples).encode()).hexdigest().startswith(TASKS[task][0])
    assert builtin_samples(task, 20, 17, "train") == {name: values[:20] for name, values in samples.items()}
    for other in ({"seed": 18}, {"split": "eval"}):
        assert builtin_samples(task, 50, **{"seed": 17, "split": "train", **other}) != samples  # type: ignore[arg-type]


@pytest.mark.pins
def test_reviews_are_reproducible() -> None:
    digest = hashlib.sha256(json.dumps(builtin_reviews(50, 17, "train")).encode()).hexdigest()
    assert digest.startswith("48726a9c6935cfe3"), digest


@pytest.mark.exhaustive
@pytest.mark.parametrize("task", TASKS)
def test_a_tiny_bert_starts_at_chance_and_learns_the_samples_in_seconds(task: str) -> None:
    _, metric, chance, (batches, least) = TASKS[task]
    sizes = (f"data.train_samples={32 * batches}", "data.eval_samples=400", "data.length_scale=0.06")
    short = (*sizes, "data.max_length=40", "scheduler.name=linear", f"trainer.max_duration={batches}ba")
    unmoved = ("data.train_samples=32", "trainer.max_duration=1ba", "scheduler.warmup=1ba", "optimizer.lr=1e-9")
    short = (f"model.task={task}", "plot=false", "export=false", "baseline=null", *short)
    before = run(*short, *unmoved, short=False)["metrics"][metric]
    after = run(*short, "scheduler.warmup=8ba", short=False)["metrics"][metric]
    assert before < chance
    assert after > least


def test_random_rows_have_max_length_and_no_special_tokens() -> None:
    tokenizer = tokenizer_of(builtin_reviews(20, 1, "train", 0.1)["text"])
    tokenizer.save_pretrained("tokenizer")
    config = DataConfig(
        source="random", tokenizer="tokenizer", max_length=12, train_samples=40, eval_samples=8, batch_size=4
    )

    def build(config: DataConfig) -> list[Any]:
        data = build_data(config, Classification(), model_name="", on_gpu=False)
        return [spec.dataloader.dataset for spec in (data.train, data.eval) if spec is not None]

    (train, evaluation), (again, _), (other, _) = map(build, (config, config, config.replaced(seed=3)))
    assert (len(train), len(evaluation)) == (40, 8)
    assert set(train.lengths.tolist()) == {12}
    assert set(train.rows["labels"].tolist()) == {0, 1}
    ids = [rows.tokens["input_ids"].tolist() for rows in (train, again, other, evaluation)]
    assert not {*ids[0]} & {*tokenizer.all_special_ids}
    assert len({*ids[0]}) > 40
    assert ids[0] == ids[1] != ids[2]
    assert ids[0][:96] != ids[3]

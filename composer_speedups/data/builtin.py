"""Built-in film reviews: generated, deterministic, and not solvable by counting words.

A review's label is the opinion of most of its clauses. Whether a clause uses words of its own polarity or
negates words of the other one is drawn apart from the label, and in a good quarter of the reviews most
clauses negate. So every sentiment word occurs in both classes, and a linear model over words stays near
the share of plain reviews (about 0.7), while one that reads "not dull" and "although …, …" can get nearly all
right. They exercise the pipeline; they are no measure of how well a model reads.
"""

from __future__ import annotations

import math
import random

__all__ = ["builtin_reviews", "builtin_samples"]

# IMDB's lengths are close to log-normal; these give a mean of about 230 words and a tail beyond 1,000.
_MEDIAN_WORDS, _SIGMA, _LEAST_WORDS = 173, 0.76, 16

_PLAIN_NEGATES, _CONTRARY_NEGATES = 0.12, 0.88  # share of a review's clauses that negate
_CONTRARY_REVIEWS = 0.28
_AGREES = 0.97  # share of a review's sentences that hold its label's opinion
_TWO_SIDED = 0.2  # share of opinion sentences with a clause for each side
_OPINIONS = 0.7  # share of sentences that hold an opinion at all

_GOOD = """wonderful brilliant charming gripping moving superb delightful clever fresh warm sharp funny
thoughtful elegant""".split()
_BAD = """dull awful clumsy boring tedious weak shallow stale flat messy lazy painful forgettable
predictable""".split()
_NEGATIONS = ["not", "never", "hardly", "anything but", "far from"]
_ASPECTS = """acting plot script score dialogue camerawork ending pacing cast story direction editing
humour soundtrack""".split()
_VERBS = ["was", "felt", "seemed"]
_WHO = ["my sister", "my neighbour", "an old friend", "my brother", "a colleague", "my aunt"]
_WHEN = ["last week", "on a rainy evening", "on a sunday", "during the holidays", "late at night"]
_WHERE = ["a small town by the sea", "a train station", "an island", "a mountain village", "the harbour"]
_NARRATION = [
    "I watched it with {who} {when}.",
    "The film runs for about two hours.",
    "It is set in {where}.",
    "{who} lent me the disc {when}.",
    "The director made two other films before this one.",
    "We saw it {when} in a half empty theatre.",
    "The story follows a detective who returns to {where}.",
    "There is a long scene in {where}.",
    "It opens with a view of {where}.",
    "A letter arrives and the family leaves for {where}.",
]


def builtin_samples(task: str, count: int, seed: int, split: str, length_scale: float = 1.0) -> dict[str, list]:
    """Samples of a task, in the columns that it reads by default; arguments as those of :func:`builtin_reviews`."""
    reviews = builtin_reviews(count, seed, split, length_scale)
    return {**reviews, "label": [("negative", "positive")[label] for label in reviews["label"]]}


def builtin_reviews(count: int, seed: int, split: str, length_scale: float = 1.0) -> dict[str, list]:
    """Generate reviews, the same ones for the same arguments on every machine.

    Args:
        count: Number of reviews.
        seed: Seed of the generator.
        split: ``"train"`` or ``"eval"``; other reviews each.
        length_scale: Length as a multiple of IMDB's.

    Returns:
        ``{"text": [str] * count, "label": [0 or 1] * count}``.
    """
    rng = random.Random(f"{split}/{seed}/{length_scale!r}")
    labels = [rng.randrange(2) for _ in range(count)]
    return {"text": [_review(rng, label, length_scale) for label in labels], "label": labels}


def _review(rng: random.Random, label: int, length_scale: float) -> str:
    words = max(_LEAST_WORDS, rng.lognormvariate(math.log(_MEDIAN_WORDS), _SIGMA) * length_scale)
    negates = _CONTRARY_NEGATES if rng.random() < _CONTRARY_REVIEWS else _PLAIN_NEGATES
    sentences = [_opinion(rng, label, negates)]  # at least one says what the review thinks
    length = len(sentences[0].split())
    while length < words:
        if rng.random() < _OPINIONS:
            sentence = _opinion(rng, label if rng.random() < _AGREES else 1 - label, negates)
        else:
            slots = {"who": rng.choice(_WHO), "when": rng.choice(_WHEN), "where": rng.choice(_WHERE)}
            sentence = rng.choice(_NARRATION).format(**slots)
        sentences.append(sentence)
        length += len(sentence.split())
    rng.shuffle(sentences)
    return " ".join(s[0].upper() + s[1:] for s in sentences)


def _opinion(rng: random.Random, side: int, negates: float) -> str:
    """A sentence in favour (side 1) or against (side 0); in a two-sided one the main clause decides."""
    main = _clause(rng, side, negates)
    if rng.random() >= _TWO_SIDED:
        return f"{main}."
    conceded = _clause(rng, 1 - side, negates)
    return f"although {conceded}, {main}." if rng.random() < 0.5 else f"{conceded} but {main}."


def _clause(rng: random.Random, side: int, negates: float) -> str:
    negated = rng.random() < negates
    adjective = rng.choice(_GOOD if (side == 1) != negated else _BAD)
    negation = f"{rng.choice(_NEGATIONS)} " if negated else ""
    return f"the {rng.choice(_ASPECTS)} {rng.choice(_VERBS)} {negation}{adjective}"

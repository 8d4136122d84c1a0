"""Built-in samples of every task: generated, deterministic, and not solvable by counting words.

The label of a film review is the opinion of most of its clauses. In a good quarter of the reviews most clauses negate
words of the opposite polarity, so a linear model over words stays near the share of plain reviews (about 0.7).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

# IMDB's lengths are roughly log-normal; these parameters give a mean of about 230 words and a tail beyond 1,000.
_MEDIAN_WORDS, _SIGMA, _LEAST_WORDS = 173, 0.76, 16

_PLAIN_NEGATES, _CONTRARY_NEGATES = 0.12, 0.88  # fraction of a review's clauses that negate
_CONTRARY_REVIEWS = 0.28
_AGREES = 0.97  # fraction of a review's opinion sentences that agree with its label
_TWO_SIDED = 0.2  # fraction of opinion sentences with a clause for each side
_OPINIONS = 0.7  # fraction of sentences that express an opinion

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


def builtin_samples(task: str, count: int, seed: int, split: str, length_scale: float = 1.0) -> dict[str, list[Any]]:
    """Samples of a task in the columns that it reads by default, the same for the same arguments on every machine."""
    if task not in _GENERATORS:
        reviews = builtin_reviews(count, seed, split, length_scale)
        return {**reviews, "label": [("negative", "positive")[label] for label in reviews["label"]]}
    columns, generate = _GENERATORS[task]
    rng = random.Random(f"{task}/{split}/{seed}/{length_scale!r}")
    rows: list[tuple[Any, ...]] = []
    while len(rows) < count:
        rows += generate(rng, length_scale)
    return {column: [row[i] for row in rows[:count]] for i, column in enumerate(columns)}


def builtin_reviews(count: int, seed: int, split: str, length_scale: float = 1.0) -> dict[str, list]:
    """Reviews with the label 0 or 1; the arguments are those of :func:`builtin_samples`."""
    rng = random.Random(f"{split}/{seed}/{length_scale!r}")
    labels = [rng.randrange(2) for _ in range(count)]
    return {"text": [_review(rng, label, length_scale) for label in labels], "label": labels}


def _review(rng: random.Random, label: int, length_scale: float) -> str:
    words = _words(rng, length_scale)
    negates = _CONTRARY_NEGATES if rng.random() < _CONTRARY_REVIEWS else _PLAIN_NEGATES
    sentences = [_opinion(rng, label, negates)]  # at least one sentence expresses the opinion
    length = len(sentences[0].split())
    while length < words:
        if rng.random() < _OPINIONS:
            sentence = _opinion(rng, label if rng.random() < _AGREES else 1 - label, negates)
        else:
            sentence = _narration(rng)
        sentences.append(sentence)
        length += len(sentence.split())
    rng.shuffle(sentences)
    return _capitalized(sentences)


def _capitalized(sentences: list[str]) -> str:
    return " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)


def _opinion(rng: random.Random, side: int, negates: float) -> str:
    """A sentence in favour (side 1) or against (side 0); in a two-sided sentence the main clause decides."""
    main = _clause(rng, side, negates)
    if rng.random() >= _TWO_SIDED:
        return f"{main}."
    conceded = _clause(rng, 1 - side, negates)
    return f"although {conceded}, {main}." if rng.random() < 0.5 else f"{conceded} but {main}."


def _clause(
    rng: random.Random,
    side: int,
    negates: float,
    aspect: str | None = None,
    good: list[str] = _GOOD,
    bad: list[str] = _BAD,
) -> str:
    negated = rng.random() < negates
    adjective = rng.choice(good if (side == 1) != negated else bad)
    negation = f"{rng.choice(_NEGATIONS)} " if negated else ""
    return f"the {aspect or rng.choice(_ASPECTS)} {rng.choice(_VERBS)} {negation}{adjective}"


def _narration(rng: random.Random) -> str:
    slots = {"who": rng.choice(_WHO), "when": rng.choice(_WHEN), "where": rng.choice(_WHERE)}
    return rng.choice(_NARRATION).format(**slots)


def _words(rng: random.Random, length_scale: float) -> float:
    return max(_LEAST_WORDS, rng.lognormvariate(math.log(_MEDIAN_WORDS), _SIGMA) * length_scale)


# --- multilabel: what a review praises, where it finds fault with other things --------------------------------------

# Topic → words of praise, words of blame.
_TOPICS = {
    "acting": ("natural heartfelt", "wooden stiff"),
    "plot": ("gripping coherent", "predictable confused"),
    "camerawork": ("gorgeous steady", "shaky murky"),
    "ending": ("satisfying surprising", "abrupt pointless"),
    "humour": ("witty funny", "crude silly"),
    "soundtrack": ("stirring melodic", "shrill loud"),
}
_MENTIONED = 0.6  # fraction of the topics that a review mentions, half of which it praises
_TOPIC_NEGATES = 0.2


def _praise(rng: random.Random, length_scale: float) -> list[tuple[str, list[str]]]:
    topics = {topic: rng.randrange(2) for topic in _TOPICS if rng.random() < _MENTIONED}
    if not topics:
        topics[rng.choice(list(_TOPICS))] = rng.randrange(2)
    words = _words(rng, length_scale)
    sentences = [_about(rng, topic, side) for topic, side in topics.items()]
    rng.shuffle(sentences)  # mention each topic before the text may be cut
    length = sum(len(sentence.split()) for sentence in sentences)
    while length < words:
        repeats = rng.random() < _OPINIONS
        sentences.append(_about(rng, *rng.choice(list(topics.items()))) if repeats else _narration(rng))
        length += len(sentences[-1].split())
    return [(_capitalized(sentences), [topic for topic in topics if topics[topic]])]


def _about(rng: random.Random, topic: str, side: int) -> str:
    good, bad = (words.split() for words in _TOPICS[topic])
    return f"{_clause(rng, side, _TOPIC_NEGATES, topic, good, bad)}."


# --- regression: stars from 0 to 5, the mean over the clauses of a review -------------------------------------------

_DEGREES = {"truly": 1.0, "very": 0.9, "quite": 0.7, "slightly": 0.6}
_REGRESSION_NEGATES = 0.2


def _stars(rng: random.Random, length_scale: float) -> list[tuple[str, float]]:
    words, favour = _words(rng, length_scale), rng.random()
    clauses, values, length = [], [], 0
    while length < words:
        side, degree = int(rng.random() < favour), rng.choice(list(_DEGREES))
        *subject, adjective = _clause(rng, side, _REGRESSION_NEGATES).split()
        clauses.append(" ".join([*subject, degree, adjective]))
        values.append(_DEGREES[degree] if side else 1 - _DEGREES[degree])
        length += len(clauses[-1].split())
    return [(_capitalized([f"{clause}." for clause in clauses]), round(5 * sum(values) / len(values), 3))]


# --- token classification: names that are people, places or companies by what stands around them --------------------

_NAMES = """berg marlow stone lake hill winter carter forest mercer abbey ford holm west bishop rivers dale north
wells frost lane""".split()
_NEWS = [
    "{PER} joined {ORG} in {LOC} .",
    "{ORG} hired {PER} as its new director .",
    "the town of {LOC} was visited by {PER} .",
    "shares of {ORG} fell after {PER} resigned .",
    "near {LOC} the police stopped {PER} .",
    "{PER} said that {ORG} would leave {LOC} .",
    "it rained in {LOC} all week .",
    "{PER} and her brother live in {LOC} .",
    "profits at {ORG} rose again .",
    "a train to {LOC} was late .",
]


def _news(rng: random.Random, length_scale: float) -> list[tuple[list[str], list[str]]]:
    length = _words(rng, length_scale)
    words: list[str] = []
    tags: list[str] = []
    while len(words) < length:
        for word in rng.choice(_NEWS).split():
            if not word.startswith("{"):
                words.append(word)
                tags.append("O")
                continue
            names = [name.capitalize() for name in rng.sample(_NAMES, rng.choice((1, 1, 2)))]
            words += names
            tags += [f"{'B' if i == 0 else 'I'}-{word[1:-1]}" for i in range(len(names))]
    return [(words, tags)]


# --- reranking: reviews that hold the opinion a query asks for, among others of the same things ----------------------

_ASKS_GOOD = "praised recommended loved admired".split()
_ASKS_BAD = "panned criticised hated mocked".split()
# With equal numbers of both kinds of query, neither the query nor the document alone would carry information about the
# label, and a model with random weights would not start to learn.
_QUERIES_FOR_GOOD = 0.75
_DOCUMENTS = 4  # documents per query, one of which is relevant
_DOCUMENT_SCALE = 0.5


def _ranked(rng: random.Random, length_scale: float) -> list[tuple[str, str, float]]:
    side = int(rng.random() < _QUERIES_FOR_GOOD)
    aspects = rng.sample(_ASPECTS, 2)
    who, asked = rng.choice(_WHO), rng.choice(_ASKS_GOOD if side else _ASKS_BAD)
    query = f"films whose {aspects[0]} and {aspects[1]} {who} {asked} {rng.choice(_WHEN)}"
    labels = [1.0] + [0.0] * (_DOCUMENTS - 1)
    rng.shuffle(labels)
    return [(query, _answer(rng, side if label else 1 - side, aspects, length_scale), label) for label in labels]


def _answer(rng: random.Random, side: int, aspects: list[str], length_scale: float) -> str:
    sentences = [f"{_clause(rng, side, 0, aspect)}." for aspect in aspects]
    return _lengthened(rng, sentences, length_scale * _DOCUMENT_SCALE)


def _lengthened(rng: random.Random, sentences: list[str], length_scale: float) -> str:
    """A text with these sentences and narration in random order."""
    words, length = _words(rng, length_scale), sum(len(sentence.split()) for sentence in sentences)
    while length < words:
        sentences.append(_narration(rng))
        length += len(sentences[-1].split())
    rng.shuffle(sentences)
    return _capitalized(sentences)


# --- embedding: stories told in none of the words that the anchor has -----------------------------------------------

# Who, does what, to what: word in the anchor/word in the positive.
_STORY = [
    [pair.split("/") for pair in words.split()]
    for words in (
        """medic/doctor attorney/lawyer teacher/professor cop/policeman chef/cook author/writer pilot/airman
        farmer/peasant sailor/seaman thief/burglar""",
        """buys/purchases vends/sells finds/discovers hides/conceals fixes/repairs wrecks/destroys paints/colours
        robs/steals borrows/loans cleans/washes""",
        """boat/ship car/automobile home/house painting/picture jewel/diamond gun/pistol road/street
        rock/boulder coat/jacket shop/store""",
    )
]
_STORIES = 2  # a million different stories, so that a batch does not contain one twice


def _alike(rng: random.Random, length_scale: float) -> list[tuple[str, str]]:
    stories = [[rng.choice(words) for words in _STORY] for _ in range(_STORIES)]
    anchor = " ".join(word for story in stories for word, _ in story)
    sentences = [f"the {who} {does} the {what}." for (_, who), (_, does), (_, what) in stories]
    return [(anchor, _lengthened(rng, sentences, length_scale * _DOCUMENT_SCALE))]


# Task → its columns, and the function that generates some of its rows.
_GENERATORS: dict[str, tuple[tuple[str, ...], Callable[[random.Random, float], list[Any]]]] = {
    "multilabel": (("text", "labels"), _praise),
    "regression": (("text", "label"), _stars),
    "token_classification": (("tokens", "ner_tags"), _news),
    "reranking": (("query", "document", "label"), _ranked),
    "embedding": (("anchor", "positive"), _alike),
}

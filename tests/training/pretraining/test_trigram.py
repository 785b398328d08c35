"""Compare the trigram model with a direct implementation of its definition."""

import math
from collections import Counter

import numpy as np
import pytest

from lossytp.training.text import trigram_perplexity

VOCABULARY = 7


def naive_probability(counts, context, word):
    """Compute interpolated Kneser-Ney by its definition, from a dictionary of counts for each order."""
    if context is None:
        return 1 / VOCABULARY
    order = counts[len(context)]
    lower = naive_probability(counts, context[1:] if context else None, word)
    behind = {gram: count for gram, count in order.items() if gram[:-1] == context}
    if not behind:
        return lower
    once, twice = (sum(count == times for count in order.values()) for times in (1, 2))
    discount = once / (once + 2 * twice) if once else 0.5
    total = sum(behind.values())
    return (max(behind.get((*context, word), 0) - discount, 0) + discount * len(behind) * lower) / total


def naive_counts(tokens):
    trigrams = Counter(zip(tokens, tokens[1:], tokens[2:], strict=False))
    bigrams = Counter(gram[1:] for gram in trigrams)
    return [Counter(gram[1:] for gram in bigrams), bigrams, trigrams]


@pytest.fixture
def texts():
    generator = np.random.default_rng(0)
    return generator.choice(VOCABULARY - 1, 300, p=[0.5, 0.2, 0.1, 0.1, 0.05, 0.05]), generator.choice(VOCABULARY, 60)


def test_equals_the_definition(texts):
    train, held_out = (text.tolist() for text in texts)
    counts = naive_counts(train)
    logs = [
        math.log(naive_probability(counts, (u, v), w))
        for u, v, w in zip(held_out, held_out[1:], held_out[2:], strict=False)
    ]
    assert trigram_perplexity(*texts, VOCABULARY) == pytest.approx(math.exp(-np.mean(logs)), rel=1e-12)


def test_probabilities_sum_to_one(texts):
    counts = naive_counts(texts[0].tolist())
    for context in [(0, 0), (0, 1), (6, 6), (6, 0)]:
        assert sum(naive_probability(counts, context, word) for word in range(VOCABULARY)) == pytest.approx(1)


def test_familiar_text_is_easier_than_noise(texts):
    train, noise = texts
    assert trigram_perplexity(train, train, VOCABULARY) < trigram_perplexity(train, noise, VOCABULARY)


def test_text_too_short_is_refused(texts):
    with pytest.raises(ValueError, match="held_out has 2 tokens: give three or more"):
        trigram_perplexity(texts[0], texts[1][:2], VOCABULARY)

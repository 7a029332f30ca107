"""The words that characterise a cluster's tokens, so that the user can read what the cluster is about."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase


def words_of(tokenizer: PreTrainedTokenizerBase, input_ids: Sequence[int]) -> list[str]:
    """For each token the word that it is part of; a token of only white space or punctuation is its own word."""
    known = {token: str(tokenizer.decode([token])) for token in set(input_ids)}
    texts = [known[token] for token in input_ids]
    words: list[str] = []
    start = 0
    for position in range(1, len(texts) + 1):
        if position == len(texts) or not _continues(texts[position - 1], texts[position]):
            word = "".join(texts[start:position])
            words += [word.strip() or repr(word)] * (position - start)
            start = position
    return words


def _continues(before: str, text: str) -> bool:
    return before[-1:].isalnum() and text[:1].isalnum()


def telling_words(words: Sequence[str], positions: Iterable[int]) -> dict[str, int]:
    """Words at some positions with their counts there, the most over-represented first (by G-test)."""
    overall, here = Counter(words), Counter(words[position] for position in positions)
    total, inside = len(words), here.total()

    def surprise(word: str) -> float:
        return here[word] * math.log(here[word] / inside * total / overall[word])

    return {word: here[word] for word in sorted(here, key=surprise, reverse=True)}

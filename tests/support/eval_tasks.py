"""Requests for tasks over a real text, with a tokenizer that is quick to count with."""

import re
from typing import Any

from sparsekv.runtime.tasks.interface import Request

from .python_help import BY_NAME

PAIRS = (
    ("What is an assert statement for?", ("debugging assertions",)),
    ("What is nowhere in it?", ("forty-two elephants",)),
)


def count_words(text: str) -> int:
    """Tokens of a tokenizer that takes words and every other sign apart."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def request(**changes: Any) -> Request:
    """Two contexts of 1,000 tokens with three questions each."""
    return Request(
        **(
            {"text": BY_NAME, "count": count_words, "length": 1000, "contexts": 2, "questions": 3, "pairs": PAIRS}
            | changes
        )
    )

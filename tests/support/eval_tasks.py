"""Requests for evaluation tasks over a real text, with a fast token counter."""

import re
from typing import Any

from sparsekv.runtime.tasks.interface import Request

from .python_help import BY_NAME

PAIRS = (
    ("What is an assert statement for?", ("debugging assertions",)),
    ("What is nowhere in it?", ("forty-two elephants",)),
)


def count_words(text: str) -> int:
    """Count the words and all other signs of a text, as its tokens."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def request(**changes: Any) -> Request:
    """Return a request for two contexts of 1,000 tokens with three questions each."""
    return Request(
        **(
            {"text": BY_NAME, "count": count_words, "length": 1000, "contexts": 2, "questions": 3, "pairs": PAIRS}
            | changes
        )
    )

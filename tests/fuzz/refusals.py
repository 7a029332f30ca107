"""Refusals that are due: what a case asks for is documented as impossible, and says so in one line."""

import re

from .case import Case

DUE = (
    r"positions",
    r"has room for",
    r"--method oracle: it bounds what a choice can do",
    r"is too short to index",
    r"--stream: a trace tells of the document's own tokens",
    r"windowed RoPE needs to know how each layer turns its keys",
    r"--residual",
    r"splits pairs of channels that RoPE turns together",
    r"how this model turns its keys is not known",
    r"--select-layer",
    r"this index has one level",
    r"no setting reads less than everything",
    r"every layer of .* has a sliding window",
    r"--stream: tokens that it moves into the index would be lost to --prefill",
    r"turns keys by the (prompt's )?length",
)
"""Parts of the messages of refusals that may be due."""
OF_FAMILIES = {
    "doge": "has a mask that the model itself makes",
    # transformers 5.17 makes a window of no tokens of a config without one
    "qwen2_moe": "hides a token from itself",
}
"""By family: the part of the message that may refuse its models."""


def is_due(case: Case, message: str) -> bool:
    """Whether a case may be refused so."""
    due = [*DUE, *(part for family, part in OF_FAMILIES.items() if family == case.family)]
    return "\n" not in message.strip() and any(re.search(part, message) for part in due)

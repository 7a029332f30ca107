"""Whether a text is a later version of the document in an index: by what they have in common, wherever it stands."""

import torch

RUN = 16
"""Tokens of a passage that is compared: long enough that texts on one subject have few in common by chance."""
LEAST_IN_COMMON = 1 / 3
"""Of an index's passages, the share that a later version of its document has too.

Edits leave more, a text that goes on all, and another text under the same licence or headings little: this project's
README of 400 commits ago has 0.41 of its passages in today's, and its pages less than 0.01 of each other's.
"""


def share_that_stays(before: torch.Tensor, after: torch.Tensor) -> float:
    """The share of an earlier text's passages that a later one has too; 1 for a text of less than one passage.

    Args:
        before, after: token ids [N] int64.
    """
    earlier = _passages(before)
    return float(torch.isin(earlier, _passages(after)).float().mean()) if len(earlier) else 1.0


def is_cut(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Whether the later text is where the earlier one begins, but for a passage where it was cut."""
    kept = len(after) - RUN
    return 0 < kept < len(before) and torch.equal(before[:kept], after[:kept])


def _passages(ids: torch.Tensor) -> torch.Tensor:
    """A number for each run of RUN tokens, [N - RUN + 1] int64: equal for equal runs, and for hardly any others."""
    runs = len(ids) - RUN + 1
    if runs < 1:
        return ids[:0]
    # Odd factors keep every bit of a token; sums and products of int64 wrap, which a hash may.
    factors = torch.randint(2**62, (RUN,), generator=torch.Generator().manual_seed(0)) * 2 + 1
    numbers = torch.zeros(runs, dtype=torch.int64)
    for place, factor in enumerate(factors):
        numbers += ids[place : place + runs] * factor
    return numbers

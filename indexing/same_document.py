"""Whether a text is a later version of the document in an index: by what they have in common, wherever it stands."""

import torch

RUN = 16
"""Tokens of a passage that is compared: long enough that texts on one subject have few in common by chance."""
LEAST_IN_COMMON = 1 / 3
"""Of the shorter text's passages, the share that a later version of a document has in common with the earlier one.

Edits in any place leave more, a text that was cut or that goes on all, and another text that begins with the same
licence or headings little: this project's README had 0.42 in common with itself 400 commits earlier, and its pages have
less than 0.01 with each other.
"""


def share_in_common(before: torch.Tensor, after: torch.Tensor) -> float:
    """The share of the passages of the shorter text that the longer one has too; 1 for a text of less than one passage.

    Args:
        before, after: token ids [N] int64.
    """
    shorter, longer = sorted((_passages(before), _passages(after)), key=len)
    return float(torch.isin(shorter, longer).float().mean()) if len(shorter) else 1.0


def _passages(ids: torch.Tensor) -> torch.Tensor:
    """A number for each run of RUN tokens, [N - RUN + 1] int64: equal for equal runs, and for hardly any others."""
    if len(ids) < RUN:
        return ids[:0]
    # Odd factors keep every bit of a token; sums and products of int64 wrap, which a hash may.
    factors = torch.randint(2**62, (RUN,), generator=torch.Generator().manual_seed(0)) * 2 + 1
    return (ids.cpu().unfold(0, RUN, 1) * factors).sum(1)

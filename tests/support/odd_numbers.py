"""Numbers that no validation of an index can keep from a kernel, such as infinity and NaN.

Huge keys give infinite logits, after which the next layers' queries are NaN.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import PreTrainedModel

KINDS = {
    "nan in a query": (torch.nan, None, False),
    "nan in some rows": (None, torch.nan, False),
    "all nan": (torch.nan, torch.nan, True),
    "inf in some rows": (None, torch.inf, False),
    "all inf": (torch.inf, torch.inf, True),
    "inf against -inf": (torch.inf, -torch.inf, True),
    "huge": (3e38, 3e38, False),
    "huge against huge": (3e38, -3e38, True),
    "denormal": (1e-40, 1e-40, True),
    "zero": (0.0, 0.0, True),
}
"""Number in the query and number in the rows, None for unchanged; and whether all places have it, or only some."""

FEW = ("nan in a query", "all inf", "huge against huge", "zero")
every_kind = pytest.mark.parametrize("kind", KINDS)
few_kinds = pytest.mark.parametrize("kind", FEW)


def odd(kind: str, query: torch.Tensor, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return copies of a query and of rows, with the numbers of a kind in KINDS."""
    in_query, in_rows, every = KINDS[kind]
    return _filled(query, in_query, every), *(_filled(one, in_rows, every) for one in rows)


def _filled(tensor: torch.Tensor, number: float | None, every: bool) -> torch.Tensor:
    if number is None:
        return tensor.clone()
    most = torch.finfo(tensor.dtype).max
    number = max(-most, min(most, number)) if abs(number) == 3e38 else number
    place = torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape)
    return tensor.masked_fill((place % 7 == 0) | every, number)


@contextmanager
def logits_full_of(model: PreTrainedModel, number: float) -> Iterator[None]:
    """Within the context, set every logit of the model to NaN or infinity, by the weights of its output layer."""
    weight = model.get_output_embeddings().weight
    before = weight.detach().clone()
    weight.data.fill_(number)
    try:
        yield
    finally:
        weight.data.copy_(before)

"""Numbers that no validation of an index can keep from a kernel: huge keys make infinite logits, and after those the
next layers' queries are no numbers at all."""

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
"""What is in the query and what in the rows, None: what was there; and whether it is in all of their places."""

FEW = ("nan in a query", "all inf", "huge against huge", "zero")
every_kind = pytest.mark.parametrize("kind", KINDS)
few_kinds = pytest.mark.parametrize("kind", FEW)


def odd(kind: str, query: torch.Tensor, *rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A query and rows with such numbers in them; copies."""
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
    """Within the context every logit of the model is such a number, or none."""
    weight = model.get_output_embeddings().weight
    before = weight.detach().clone()
    weight.data.fill_(number)
    try:
        yield
    finally:
        weight.data.copy_(before)

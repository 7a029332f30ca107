"""Sampling parameters, the logits processors that apply them, and drawing tokens."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from sparsekv.formats.errors import UsageError, check_type

LEAST_TEMPERATURE = 1e-5
"""The smallest allowed temperature above 0. Float32 logits divided by a far smaller one would overflow."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of an answer; temperature 0 is greedy decoding. Raises the errors of `check_sampling`."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_sampling(self)


def check_sampling(values: Any, named: Callable[[str], str] = str) -> None:
    """Raise UsageError for an invalid value, and for `top_p` or `top_k` at temperature 0, where they have no effect.

    Args:
        values: an object with the fields of `Sampling`.
        named: returns the name of a field in the message.
    """
    for field in fields(Sampling):
        check_type(named(field.name), getattr(values, field.name), field.type)
    wrong = {
        "max_new_tokens": (values.max_new_tokens < 1, "at least 1"),
        "temperature": (
            not (values.temperature == 0 or LEAST_TEMPERATURE <= values.temperature < math.inf),
            f"0 (greedy), or at least {LEAST_TEMPERATURE:g}",
        ),
        "top_p": (values.top_p is not None and not 0 < values.top_p <= 1, "a share above 0 and at most 1"),
        "top_k": (values.top_k is not None and values.top_k < 1, "at least 1"),
        "seed": (not -(2**63) <= values.seed < 2**63, "a whole number from -2**63 to 2**63 - 1"),
    }
    for name, (is_wrong, remedy) in wrong.items():
        if is_wrong:
            raise UsageError(f"{named(name)} {getattr(values, name)}: give {remedy}")
    for name in ("top_p", "top_k"):
        if (value := getattr(values, name)) is not None and not values.temperature:
            raise UsageError(
                f"{named(name)} {value} has no effect at {named('temperature')} 0, which always takes the most likely "
                f"token; give a temperature above 0, or leave {named(name)} out"
            )


def warpers(sampling: Sampling) -> LogitsProcessorList:
    """Return the logits processors that transformers would use for a temperature above 0, top-k and top-p.

    Values are converted, because the processors accept only Python's float and int, and a `Sampling` may have others.
    """
    found = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_k:
        found.append(TopKLogitsWarper(int(sampling.top_k)))
    if sampling.top_p is not None and sampling.top_p < 1:
        found.append(TopPLogitsWarper(float(sampling.top_p)))
    return found


def draw(scores: torch.Tensor, sampling: Sampling, randoms: Sequence[torch.Generator]) -> list[int]:
    """Draw a token for each row of scores [B, V].

    Each answer has its own generator, because all threads of the process share torch's global generator. The random
    numbers equal those after `torch.manual_seed(seed)`.
    """
    nothing = torch.empty(len(scores), 0, dtype=torch.int64, device=scores.device)
    probability = warpers(sampling)(nothing, scores).softmax(-1)  # type: ignore[arg-type]  # any tensors will do
    each = [torch.multinomial(one, 1, generator=random) for one, random in zip(probability, randoms, strict=True)]
    return torch.cat(each).tolist()

"""Sampling parameters, the logits processors that apply them, and drawing tokens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from sparsekv.formats.errors import UsageError, check_at_least_one, check_type

LEAST_TEMPERATURE = 1e-5  # the smallest allowed temperature above 0, because float32 logits are divided by it


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of an answer; temperature 0 is greedy decoding."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            check_type(f"--{field.name.replace('_', '-')}", getattr(self, field.name), field.type)
        check_at_least_one(self, "max_new_tokens")
        if not 0 <= self.temperature < math.inf:
            raise UsageError(f"--temperature {self.temperature}: give 0 (greedy) or more")
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise UsageError(f"--temperature {self.temperature}: give 0 (greedy), or at least {LEAST_TEMPERATURE:g}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"--top-p {self.top_p}: give a share above 0 and at most 1")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"--top-k {self.top_k}: give at least 1")
        if not -(2**63) <= self.seed < 2**63:
            raise UsageError(f"--seed {self.seed}: give a whole number of at most {2**63 - 1}")
        for option, value in {"--top-p": self.top_p, "--top-k": self.top_k}.items():
            if value is not None and not self.temperature:
                raise UsageError(
                    f"{option} {value} has no effect at --temperature 0, which always takes the most likely token; "
                    "give a temperature above 0, or leave the option out"
                )


def warpers(sampling: Sampling) -> LogitsProcessorList:
    """Return the logits processors that transformers would use for a temperature above 0, top-k and top-p."""
    found = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None and sampling.top_p < 1:
        found.append(TopPLogitsWarper(sampling.top_p))
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

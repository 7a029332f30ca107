"""Sampling: how an answer's tokens are drawn, by random numbers of the answer's own."""

import math
from dataclasses import dataclass

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sparsekv.formats.errors import UsageError, check_at_least_one

LEAST_TEMPERATURE = 1e-5  # logits are divided by it, in float32


@dataclass(frozen=True)
class Sampling:
    """How tokens are sampled; temperature 0 is greedy."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
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
                    f"{option} {value}: means nothing at --temperature 0, which takes the likeliest token; give one "
                    "above 0, or leave it out"
                )


def warpers(sampling: Sampling) -> LogitsProcessorList:
    """The processors that transformers' own loop would make of a temperature above 0, top-k and top-p."""
    found = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None and sampling.top_p < 1:
        found.append(TopPLogitsWarper(sampling.top_p))
    return found


class Draw(LogitsProcessor):
    """Draws each sequence's token and leaves no other to choose: scores [B, V] are -inf but for the drawn token's.

    The random numbers are those of `torch.manual_seed(seed)`, from a generator of the answer's own: torch's global one
    is shared by all threads of the process. A drawn token without a finite probability has it as its score.
    """

    def __init__(self, sampling: Sampling, device: torch.device):
        self.warpers = warpers(sampling)
        self.random = torch.Generator(device).manual_seed(sampling.seed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        probability = self.warpers(input_ids, scores).softmax(-1)  # type: ignore[arg-type]  # any tensors will do
        token = torch.multinomial(probability.nan_to_num(1.0), 1, generator=self.random)
        return torch.full_like(scores, -math.inf).scatter(-1, token, probability.gather(-1, token))

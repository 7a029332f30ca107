"""Sampling parameters, and logits processors that sample tokens with each answer's own random generator."""

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
    """Return the logits processors that transformers would use for a temperature above 0, top-k and top-p."""
    found = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        found.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None and sampling.top_p < 1:
        found.append(TopPLogitsWarper(sampling.top_p))
    return found


class Draw(LogitsProcessor):
    """Logits processor that samples each sequence's token, and sets the scores [B, V] of all other tokens to -inf.

    The sampled token's score is its probability, even if that is not finite, so that a later check can detect it. The
    random numbers are those of `torch.manual_seed(seed)`. They come from a generator of the answer's own, because
    torch's global generator is shared by all threads of the process.
    """

    def __init__(self, sampling: Sampling, device: torch.device):
        self.warpers = warpers(sampling)
        self.random = torch.Generator(device).manual_seed(sampling.seed)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        probability = self.warpers(input_ids, scores).softmax(-1)  # type: ignore[arg-type]  # any tensors will do
        token = torch.multinomial(probability.nan_to_num(1.0), 1, generator=self.random)
        return torch.full_like(scores, -math.inf).scatter(-1, token, probability.gather(-1, token))

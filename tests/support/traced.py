"""Steps of real answers of a small index, as they were attended to."""

from dataclasses import dataclass
from functools import partial

import torch

from sparsekv.runtime.attention.config import DecodeConfig, Dense, Own, QuestionPrefill
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.decoding.answer import Answer, Sampling, question_ids
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.session import Session
from sparsekv.runtime.reporting.report import forms
from sparsekv.runtime.selection.interface import Budget, MethodSpec, methods
from sparsekv.runtime.tracing.recorder import AttendedStep, RecordingExecutor, Shares

SOME = Budget(0.1)
DENSE, OWN = Dense(), Own()


@dataclass(frozen=True)
class Answered:
    """A question's tokens, its answer, and each layer's steps: the question's, then one for each token but the last."""

    question: torch.Tensor
    answer: Answer
    steps: dict[int, list[AttendedStep]]
    cache: IndexCache


def every_form(index: OpenIndex) -> dict[str, MethodSpec]:
    """Every method of an index in every variant, and with a residual where it has no replacement of its own."""
    found = [form for name in methods() for form in forms(index.artifact, name, residual=True)]
    return {form.title: form for form in found}


def answered(
    index: OpenIndex,
    form: MethodSpec,
    budget: Budget = SOME,
    tokens: int = 3,
    prefill: Dense | Own | QuestionPrefill = OWN,
) -> Answered:
    """Answers a question of the index with a form of a method."""
    steps: dict[int, list[AttendedStep]] = {layer: [] for layer in index.artifact.manifest.indexed_layers}
    asker = Session.open(
        index,
        DecodeConfig(form, budget, question=prefill),
        gather_makers=lambda layer: partial(RecordingExecutor, record=steps[layer].append),
    )
    question = question_ids(index, "What comes next?")
    return Answered(question, asker.ask(question, Sampling(tokens)), steps, asker.cache)


def chosen_tokens(shares: Shares) -> torch.Tensor:
    """[Hk, M]: what was chosen of each token of the middle, in order of position."""
    padded = torch.zeros(len(shares.chosen), shares.others.shape[2] + 1)
    return padded.scatter_add_(1, shares.positions, shares.chosen)[:, :-1]

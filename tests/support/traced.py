"""Recorded attention of the steps of real answers over a small index."""

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
    """A question's tokens, its answer, and each layer's steps: the question's step, then a step for each token but the
    last."""

    question: torch.Tensor
    answer: Answer
    steps: dict[int, list[AttendedStep]]
    cache: IndexCache


def every_form(index: OpenIndex) -> dict[str, MethodSpec]:
    """Return every method of an index in every variant; a method without centroids for the rest also with a
    residual."""
    found = [form for name in methods() for form in forms(index.artifact, name, residual=True)]
    return {form.title: form for form in found}


def answered(
    index: OpenIndex,
    form: MethodSpec,
    budget: Budget = SOME,
    tokens: int = 3,
    prefill: Dense | Own | QuestionPrefill = OWN,
) -> Answered:
    """Answer a question of the index by a variant of a method."""
    steps: dict[int, list[AttendedStep]] = {layer: [] for layer in index.artifact.manifest.indexed_layers}
    asker = Session.open(
        index,
        DecodeConfig(form, budget, question=prefill),
        gather_makers=lambda layer: partial(RecordingExecutor, record=steps[layer].append),
    )
    question = question_ids(index, "What comes next?")
    return Answered(question, asker.ask(question, Sampling(tokens)), steps, asker.cache)


def chosen_tokens(shares: Shares) -> torch.Tensor:
    """Return the share [Hk, M] of each middle token that was chosen, in order of position."""
    padded = torch.zeros(len(shares.chosen), shares.others.shape[2] + 1)
    return padded.scatter_add_(1, shares.positions, shares.chosen)[:, :-1]

"""Tries a model on a few tokens before its prefill: whether its answers over captured rows are those it gives itself.

Decided by running the model, not by its name: a short sequence goes once through the model's own attention, and once
through a capture in chunks and then, token by token, through attention over the captured rows, as an answer does.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from transformers import Cache, PreTrainedModel

from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.models.hub import first_line
from sparsekv.formats.models.rope import rope_depends_on_length
from sparsekv.indexing.capture.capture import Capture, capture
from sparsekv.indexing.capture.context_layer import ContextLayer
from sparsekv.indexing.prefill.interface import DensePrefill
from sparsekv.kernels.common.cache_argument import with_cache
from sparsekv.kernels.common.given_rows import soft_caps
from sparsekv.kernels.common.hook import AttentionCall, alone, route_attention

TOKENS, DOCUMENT, CHUNK, SINGLE = 48, 32, 16, 2
"""Tokens of the trial, those that are captured, how many at a time, and those that are fed one by one at the end."""
TOLERANCE = {torch.float32: 1e-2, torch.float16: 5e-2, torch.bfloat16: 1e-1}
"""Largest difference of logits relative to the largest logit: rounding stays below, with room for an expert that
rounding chooses otherwise, and a mask or a scale that is left out does not."""


@torch.inference_mode()
def preflight(model: PreTrainedModel, input_ids: torch.Tensor, name: str) -> None:
    """Check on a few tokens of a prompt that an index can follow the model.

    Takes six forward passes over at most 48 tokens; processes that share a model run them together.

    Args:
        input_ids: [N] int64, the prompt.
        name: the model's, for error messages.

    Raises:
        SparsekvError: the model lacks tokens of the prompt, or an index cannot follow it.
    """
    _check_ids(model, input_ids, name)
    ids = input_ids.repeat(-(-TOKENS // len(input_ids)))[:TOKENS].to(model.device)
    try:
        difference = _difference(model, ids, name)
        if difference > TOLERANCE[model.dtype]:
            # Rounding may choose another expert for some token, but hardly for these and for those.
            difference = _difference(model, ids.flip(0), name)
    except SparsekvError as error:
        raise SparsekvError(f"{name} cannot be indexed: {error}; choose another model") from None
    if difference > TOLERANCE[model.dtype]:
        raise SparsekvError(
            f"{name} cannot be indexed: over captured keys and values its logits are {difference:.0%} from its own, so "
            "that it has a mask or a state that an index lacks; choose another model"
        )


def _check_ids(model: PreTrainedModel, input_ids: torch.Tensor, name: str) -> None:
    known, highest = len(model.get_input_embeddings().weight), int(input_ids.max())  # type: ignore[arg-type]
    if highest >= known:
        raise SparsekvError(
            f"the document has token id {highest}, and {name} has {known} embeddings: its tokenizer belongs to another "
            "model; put the right one into its folder"
        )


def _difference(model: PreTrainedModel, ids: torch.Tensor, name: str) -> float:
    """The largest difference of logits over captured rows from the model's own for token ids [T], relative to the
    largest logit; 0 where they are not finite, which the prefill finds and tells."""
    with _tried("it does not run on token ids alone"), alone(model), soft_caps(model):
        own = model(input_ids=ids[None], use_cache=False).logits[0].float()
    # Frequencies that depend on the sequence's length may change within the trial: then all of it is captured, at once.
    by_length = rope_depends_on_length(getattr(model.config.get_text_config(), "rope_parameters", None))
    document = TOKENS if by_length else DOCUMENT
    with _tried("its attention does not run over a cache of keys and values as attended"):
        captured = capture(model, ids[:document], tail=1, chunk_size=CHUNK)
        _check_windows(captured, name)
        answered = [] if by_length else _answer_logits(model, ids[document:], _AnswerCache(captured))
    found = torch.cat([captured.logits[None], *answered])
    difference = float((found - own[document - 1 :]).abs().max() / own.abs().max())
    return difference if math.isfinite(difference) else 0.0


def _check_windows(captured: Capture, name: str) -> None:
    if all(captured.facts(layer).sliding_window is not None for layer in range(len(captured))):
        raise SparsekvError(f"every layer of {name} has a sliding window, and an index is of those that see all tokens")


@contextmanager
def _tried(what: str) -> Iterator[None]:
    """Turns whatever a model raises into a SparsekvError: `what`, and the model's own reason."""
    try:
        yield
    except (SparsekvError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model is a program and may raise anything
        raise SparsekvError(f"{what} ({type(error).__name__}: {first_line(error)})") from None


class _AnswerCache(Cache):
    """Captured rows as an answer attends to them: `attend` appends the keys and values that it is called with.

    Raises:
        SparsekvError: the layers have heads of different sizes.
    """

    def __init__(self, captured: Capture):
        rows = [captured.take(layer) for layer in range(len(captured))]
        if len(sizes := sorted({(len(one.keys), one.keys.shape[2]) for one in rows})) > 1:
            told = " and ".join(f"{heads} KV heads of {channels} channels" for heads, channels in sizes)
            raise SparsekvError(f"its layers differ in size ({told}), which no index holds")
        self.rows = [ContextLayer(TOKENS, (one.keys, one.values)) for one in rows]
        self.heads, self.channels = sizes[0]
        super().__init__(layers=list(self.rows))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Dense attention [Hq, Q, D] to captured and appended rows; SparsekvError for rows of other sizes."""
        if (len(call.keys), call.keys.shape[2]) != (self.heads, self.channels):
            told = f"{len(call.keys)} heads of {call.keys.shape[2]} channels"
            raise SparsekvError(
                f"it attends with keys ({told}) that are not those in its cache ({self.heads} of {self.channels})"
            )
        rows = self.rows[call.layer]
        if rows.get_seq_length() + call.keys.shape[1] > TOKENS:
            raise SparsekvError("its layers attend several times to each token, which no index follows")
        keys, values = rows.update(call.keys[None], call.values[None])
        return DensePrefill().attend(replace(call, keys=keys[0], values=values[0]), 0)


def _answer_logits(model: PreTrainedModel, ids: torch.Tensor, cache: _AnswerCache) -> list[torch.Tensor]:
    """Logits [T, vocabulary] in all after each of the token ids [T] that follow the cache's: the last ones fed one by
    one."""
    with route_attention(model, cache.attend):
        return [
            model(input_ids=part[None], **with_cache(model, cache)).logits[0].float()
            for part in (ids[:-SINGLE], *ids[-SINGLE:].split(1))
        ]

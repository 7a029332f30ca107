"""Trace of an answer: what each answer token attended to, and the answer's log-probability without some passages.

A passage is hidden from attention as far as this is possible without another prefill.
"""

import gc
import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch.nn.functional import log_softmax

from sparsekv.formats.documents.plain_text import encode_text
from sparsekv.formats.errors import UsageError
from sparsekv.kernels.attention.attention import Segment, attend
from sparsekv.kernels.common.given_rows import tokens_at, with_cache
from sparsekv.kernels.common.hook import route_attention
from sparsekv.runtime.attention.config import DecodeConfig, Dense
from sparsekv.runtime.attention.executors import (
    Fetched,
    GatherExecutor,
    GatherMaker,
    LayerOutput,
    Step,
    attend_in_layout,
)
from sparsekv.runtime.attention.sparse_layer import appends
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.cache.kv_store import LayerRows
from sparsekv.runtime.decoding.answer import Answer, Sampling
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.session import Session
from sparsekv.runtime.decoding.threads import all_cores, exclusive, free_cores
from sparsekv.runtime.methods.oracle import Oracle
from sparsekv.runtime.reporting.recall import chosen_positions
from sparsekv.runtime.selection.interface import CentroidSegment, MethodSpec, Selection, Selector
from sparsekv.runtime.sources.places import Passages, split_passages, token_texts
from sparsekv.runtime.tracing.recorder import (
    MEASURES,
    MOST_IN_MEAN,
    Largest,
    LayerRecorder,
    RecordingExecutor,
    TokenRecorder,
    largest_passages,
)


class HidingExecutor(GatherExecutor):
    """Executor that selects as a `GatherExecutor` does and gives hidden tokens no attention.

    Rows of hidden tokens are masked, whether they were selected or are always attended to (sinks, tail). If the method
    reports each token's centroid, a centroid's token count is reduced by the hidden tokens that it represents. The
    centroid's key and value stay the means over all its tokens.

    Args:
        layer, options: the arguments of `GatherExecutor`.
        hidden: [N] bool, True for the hidden ones of the prompt's N tokens, in order of position.
        sinks: number of tokens before the middle.
    """

    def __init__(self, *layer: Any, hidden: torch.Tensor, sinks: int, **options: Any):
        super().__init__(*layer, **options)
        self.hidden, self.sinks = hidden, sinks

    def attend_to_everything(self, step: Step) -> torch.Tensor:
        return attend_in_layout(self, step)

    def attend_to(self, step: Step, selection: Selection, selector: Selector) -> LayerOutput:
        hidden = self.hidden.to(step.query.device)
        middle = hidden[self.sinks : self.sinks + self.middle.used]
        beside = torch.cat([hidden[: self.sinks], hidden[self.sinks + self.middle.used :]])
        fetched = self._without(self.fetch(selection, step.query.device), selection, selector, middle)
        chosen, exact, *rest = fetched.segments(step)
        output = attend(step.query, [chosen, _masked(exact, beside), *rest], *step.how)
        return LayerOutput(output, fetched.rows_read)

    def _without(self, fetched: Fetched, selection: Selection, selector: Selector, hidden: torch.Tensor) -> Fetched:
        """Mark the fetched rows of hidden tokens [M] as not valid.

        If the method reports each token's centroid, also reduce the token counts of attended centroids.
        """
        positions = chosen_positions(selection.rows, self.selector.layout, len(hidden)).to(hidden.device)
        shown = ~torch.cat([hidden, hidden.new_ones(1)])[positions]
        valid = shown if fetched.valid is None else shown & fetched.valid
        rest, report = fetched.rest, selector.report
        if fetched.rest_attended and report is not None and report.centroid_of is not None:
            left = torch.ones(len(positions), len(hidden) + 1, device=hidden.device)
            left = left.scatter_(1, positions[:, -1], 0.0)[:, :-1]
            rest = _fewer(rest, report.centroid_of(rest).to(hidden.device), left, hidden)
        return replace(fetched, valid=valid, rest=rest)


def _masked(exact: Segment, hidden: torch.Tensor) -> Segment:
    """Mask the hidden tokens [E] among the rows of sinks and tail; the rows of new tokens follow them."""
    shown = torch.ones(exact.keys.shape[1], dtype=torch.bool, device=hidden.device)
    shown[: len(hidden)] = ~hidden
    return replace(exact, mask=shown if exact.mask is None else exact.mask & shown)


def _fewer(
    rest: tuple[CentroidSegment, ...], numbers: torch.Tensor, left: torch.Tensor, hidden: torch.Tensor
) -> tuple[CentroidSegment, ...]:
    """Reduce the token count of each centroid by the hidden tokens that it represents.

    Args:
        numbers: [Hk, M] int64, index of each token's centroid, counted through the segments.
        left: [Hk, M], 1 for a token that a centroid represents, else 0.
    """
    sizes = [part.keys.shape[1] for part in rest]
    none = torch.zeros(len(numbers), sum(sizes), device=left.device)
    counts, shown = (none.scatter_add(1, numbers, some) for some in (left, left * ~hidden))
    shares = (shown / counts.clamp(min=1)).log().split(sizes, 1)
    return tuple(
        replace(part, log_counts=part.log_counts + share[:, None], scored=None)
        for part, share in zip(rest, shares, strict=True)
    )


MOST_FOUND = 64
"""Maximum number of occurrences of a passage. A text with more is a word or a punctuation mark, not a passage."""


def tokens_of(
    passages: Iterable[str],
    texts: Sequence[str],
    as_stored: Callable[[str], str] = lambda passage: passage,
    before: str = "",
) -> torch.Tensor:
    """Mark the tokens of a prompt that have at least one character of a passage: [N] bool.

    All occurrences of each passage are marked. White space in a passage matches any white space.

    Args:
        texts: the text of each of the prompt's N tokens.
        as_stored: returns a passage as the tokenizer normalises it, such as with NFC.
        before: the chat template's text before the document, in which no passage is searched.

    Raises:
        UsageError: a passage is empty, not in the document, or occurs more than `MOST_FOUND` times.
    """
    whole, stops = "".join(texts), torch.tensor(list(accumulate(map(len, texts))))
    starts = torch.cat([stops.new_zeros(1), stops[:-1]])
    found = torch.zeros(len(texts), dtype=torch.bool)
    # Tokenizers of some families decode the template's text with other white space.
    head = re.match(r"\s*".join(map(re.escape, "".join(before.split()))), whole)
    begin = 0 if head is None else head.end()
    for passage in passages:
        for start, stop in _places(passage, as_stored(passage), whole, begin):
            # Several tokens may make up one character. Only the last of them has a text; the others' texts are empty.
            found |= (starts < stop) & ((stops > start) | (starts >= start))
    return found


def _places(passage: str, stored: str, whole: str, begin: int) -> list[tuple[int, int]]:
    words = stored.split()
    if not passage.strip():
        raise UsageError("--without is empty; give a passage of the document")
    pattern = re.compile(r"\s+".join(map(re.escape, words)))
    places = [match.span() for match, _ in zip(pattern.finditer(whole, begin), range(MOST_FOUND + 1), strict=False)]
    if not places:
        raise UsageError(
            f"--without {shlex.quote(passage)}: the indexed document has no such passage; copy it from the document"
        )
    if len(places) > MOST_FOUND:
        raise UsageError(f"--without {passage}: found in more than {MOST_FOUND} places; give more of the passage")
    return places


@torch.inference_mode()
def log_probability(
    index: OpenIndex, cache: IndexCache, question: torch.Tensor, answer: Sequence[int], *, at_once: bool
) -> float:
    """Compute the log-probability of an answer after a question: the sum of its tokens' log-probabilities.

    Rewinds the cache first. Feeds the question in one forward pass and then, unless `at_once` is set, the answer token
    by token, as generation does.

    Args:
        cache: a cache of this index.
        question: [Q] token ids after the stored prompt.
        answer: the answer's token ids.
        at_once: feed question and answer in one forward pass. The result is the same if attention is dense.
    """
    device = index.model.device
    said = torch.tensor(answer, dtype=question.dtype)
    fed = [torch.cat([question, said[:-1]])] if at_once else [question, *said[:-1, None]]
    total = torch.zeros((), dtype=torch.float64, device=device)
    model = index.model
    with exclusive(model), route_attention(model, cache.attend), free_cores(model) as cores, all_cores(model):
        cache.rewind()
        cache.expect_prompt(index.split.tokens + len(question))
        for ids, next_ids in zip(fed, said.split(len(said) if at_once else 1), strict=True):
            cores.follow()
            model_input = {**tokens_at(model, ids, cache.get_seq_length()), **with_cache(model, cache)}
            logits = model(**model_input, logits_to_keep=len(next_ids)).logits[0]
            total += log_softmax(logits.double(), -1).gather(1, next_ids[:, None].to(device)).sum()
    return float(total)


SHARES = ("exact", "chosen", "stood_for", "missed")
LEAST = 1e-4
"""Minimum share of attention of a passage or token that a trace lists."""


def recorded(recorder: TokenRecorder, layers: list[int], first_token: int) -> dict[str, Any]:
    """Return the means and the records of an answer as JSON values; docs/how-to/trace.md documents each key.

    Args:
        layers: indices of the model's layers.
        first_token: position in the prompt of the first token after the sinks.
    """
    tokens = recorder.tokens
    totals = torch.stack([one.totals for one in tokens]).double().cpu()  # [T, 3 or 4, L, Hk]
    # The first answer token is predicted in the question's step, in which many tokens share a selection. So this step
    # counts only if the answer has no other token.
    of_steps = torch.stack([one.measures for one in tokens[1:] or tokens]).mean(0).cpu()
    heads = [(number, layer, head) for number, layer in enumerate(layers) for head in range(totals.shape[3])]
    of_head = _passages(largest_passages(recorder.sums / len(tokens), MOST_IN_MEAN))
    with _uncollected():
        records = list(_records(recorder, totals, layers, first_token))
    return {
        "measures": _named(of_steps.mean((1, 2)).tolist()),
        "by_head_measures": [
            {"layer": layer, "kv_head": head, **_named(of_steps[:, number, head].tolist())}
            for number, layer, head in heads
        ],
        "by_token": [
            _shares(of_token, _passages(one.mean))
            for of_token, one in zip(totals.mean((2, 3)).tolist(), tokens, strict=True)
        ],
        "by_head": [
            {"layer": layer, "kv_head": head, **_shares(of_head_totals, of_head[number][head])}
            for (number, layer, head), of_head_totals in zip(heads, totals.mean(0).flatten(1).T.tolist(), strict=True)
        ],
        "records": records,
    }


@contextmanager
def _uncollected() -> Iterator[None]:
    """Turn off Python's garbage collector in the context.

    Lists of numbers contain no reference cycles. Searching all objects for cycles takes four times as long as building
    the lists.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _records(
    recorder: TokenRecorder, totals: torch.Tensor, layers: list[int], first_token: int
) -> Iterator[dict[str, Any]]:
    """Yield one record for each answer token, layer and KV head, in this order."""
    of_records = totals.movedim(1, -1).tolist()
    nothing: Any = [[[]] * totals.shape[3]] * totals.shape[2]
    for token, one in enumerate(recorder.tokens):
        passages, chosen = _passages(one.passages), _listed(one.chosen, first_token)
        missed = nothing if one.missed is None else _listed(one.missed, first_token)
        measured = _rounded(one.measures.cpu()).movedim(0, -1).tolist()
        for number, layer in enumerate(layers):
            for head, of_head in enumerate(of_records[token][number]):
                yield {
                    "token": token,
                    "layer": layer,
                    "kv_head": head,
                    **_shares(of_head, passages[number][head]),
                    **_named(measured[number][head]),
                    "chosen_tokens": chosen[number][head],
                    "missed_tokens": missed[number][head],
                }


def _shares(totals: list[float], passages: list[list[float]]) -> dict[str, Any]:
    """Return the totals by the names in `SHARES`. The missed share is None if there are only three totals."""
    return {**dict(zip(SHARES, [*totals, None], strict=False)), "passages": passages}


def _named(measures: list[float]) -> dict[str, float | None]:
    known = zip(MEASURES, measures, strict=True)
    return {name: None if math.isnan(value) else value for name, value in known}


def _passages(largest: Largest) -> Any:
    """List the largest passages as `_listed` does, with a missed share of 0 where it is not known."""
    shares = largest.shares
    return _listed(Largest(largest.places, torch.cat([shares, shares.new_zeros(3 - len(shares), *shares.shape[1:])])))


def _listed(largest: Largest, first: int = 0) -> Any:
    """Convert the largest shares to nested lists. The outer axes are the axes of `places` except the last, K.

    Each innermost list has entries `[place, share]`, with one share for each row of `shares`. `first` is added to each
    place. Entries whose shares sum to less than `LEAST` are left out.
    """
    counts = (largest.shares.sum(0) >= LEAST).sum(-1).tolist()
    shares = _rounded(largest.shares.double()).movedim(0, -1).tolist()
    return _joined((largest.places + first).tolist(), shares, counts)


def _joined(places: Any, shares: Any, counts: Any) -> Any:
    if isinstance(counts, list):
        return [_joined(*each) for each in zip(places, shares, counts, strict=True)]
    return [[place, *of_place] for place, of_place in zip(places[:counts], shares[:counts], strict=True)]


def _rounded(shares: torch.Tensor) -> torch.Tensor:
    """Round float64 shares to four significant digits, and at most 15 digits after the decimal point.

    The result is the double nearest to the decimal number, because it is a quotient of two whole numbers.
    """
    behind = (3 - shares.clamp(min=1e-12).log10().floor()).clamp(max=15)
    whole = 10.0**behind
    return (shares * whole).round() / whole


class Tracer:
    """Records what the decode steps of one answer attend to, in each indexed layer.

    Args:
        passages: passages of the prompt, whose attention shares are recorded.
        truth: also compute dense attention of each step's queries. On a GPU this allocates a second copy of the
            document's keys and values.
    """

    def __init__(self, index: OpenIndex, config: DecodeConfig, passages: Passages, *, truth: bool):
        manifest, device = index.artifact.manifest, index.model.device
        self.split = manifest.split
        first, middle = self.split.sinks, self.split.middle
        self.recorder = TokenRecorder(len(manifest.indexed_layers), middle)
        passage_of = passages.of_tokens()[first : first + middle].to(device)
        lengths = passage_of.bincount(minlength=len(passages))
        passage_of = torch.cat([passage_of, passage_of.new_tensor([len(passages)])])
        self.layers = {
            layer: LayerRecorder(
                lengths,
                passage_of,
                config.budget_of(layer).tokens(middle),
                LayerRows(index.artifact, layer) if truth else None,
                self.recorder.add,
            )
            for layer in manifest.indexed_layers
        }

    def gather_maker(self, layer: int) -> GatherMaker:
        """Return a function that creates a layer's executor."""
        return partial(RecordingExecutor, record=self.layers[layer])

    def shares(self) -> dict[str, Any]:
        """Return the recorded shares, in the format of `recorded`."""
        return recorded(self.recorder, list(self.layers), self.split.sinks)


VERSION = 1
SOURCES = 8
"""Maximum number of an answer's sources in its trace."""
EVERYTHING = MethodSpec("oracle", "", Oracle())
"""Dense attention as a method: the oracle, used with a budget of all tokens."""
DENSELY = DecodeConfig(EVERYTHING, question=Dense())


@dataclass
class TracedIndex:
    """An open index that answers greedily with a config and traces its answers.

    `passages` are the prompt's sentences.
    """

    index: OpenIndex
    config: DecodeConfig
    passages: Passages = field(init=False)

    def __post_init__(self) -> None:
        self.passages = split_passages(token_texts(self.index.tokenizer, self.index.input_ids.tolist()))

    def trace(
        self,
        question: torch.Tensor,
        max_new_tokens: int,
        on_text: Callable[[str], None] = lambda text: None,
        *,
        truth: bool = False,
    ) -> tuple[Answer, dict[str, Any]]:
        """Answer a question; return the answer and its trace as a JSON object without the question's text.

        Args:
            question: [Q] token ids, as `question_ids` returns them.
            on_text: called with each piece of the answer's text when it is decoded.
            truth: compare each step with dense attention of its own queries.

        Raises:
            UsageError: the config appends tokens of the answer to the index. Also raises the errors of `Session.ask`.
        """
        tracer = Tracer(self.index, self._attending, self.passages, truth=truth)
        asker = self._asker(self._attending, tracer.gather_maker)
        answer = asker.ask(question, Sampling(max_new_tokens), on_text, sources=SOURCES)
        return answer, {**self._about(answer), "truth": truth, **tracer.shares()}

    @property
    def _attending(self) -> DecodeConfig:
        """The config with which the index answers. Dense attention runs as the oracle, whose steps can be recorded."""
        return DENSELY if isinstance(self.config.attention, Dense) else self.config

    def hide(self, passages: Sequence[str]) -> torch.Tensor:
        """Mark the document's tokens that belong to some passages: [N] bool. Raises the errors of `tokens_of`.

        A passage may end in the document's last characters, which are not tokenized with the document but with the
        question.

        Raises:
            UsageError: the model has layers with a state, which contains the passages.
        """
        if self.index.artifact.manifest.states:
            raise UsageError(
                "--without: the model has layers with a state, from which a passage cannot be removed; leave the "
                "option out, or build an index of the document without the passage"
            )
        tokenizer, prompt = self.index.tokenizer, self.index.artifact.manifest.prompt

        def as_stored(passage: str) -> str:
            return "".join(token_texts(tokenizer, encode_text(tokenizer, passage).ids))

        texts = [*self.passages.texts, "" if prompt.border is None else prompt.border.held]
        return tokens_of(passages, texts, as_stored, "" if prompt.chat is None else prompt.chat.before)[:-1]

    def without(
        self, hidden: torch.Tensor, question: torch.Tensor, max_new_tokens: int, first: Answer, *, truth: bool = False
    ) -> dict[str, Any]:
        """Answer a question while the hidden tokens get no attention.

        Returns this answer, and the log-probability of the first answer with the hidden tokens and without them. With
        `truth` it also returns both log-probabilities under dense attention.

        Args:
            hidden: [N] bool, the tokens to hide.
            first: the answer with all tokens.
        """
        again = self._asker(self._attending, self._hiding(hidden))
        answer = again.ask(question, Sampling(max_new_tokens))
        found = {
            "answer": answer.text,
            "log_probability": self._log_probabilities(self._attending, hidden, question, first),
        }
        if truth:
            found["dense_log_probability"] = self._log_probabilities(DENSELY, hidden, question, first)
        return found

    def _log_probabilities(
        self, config: DecodeConfig, hidden: torch.Tensor, question: torch.Tensor, first: Answer
    ) -> list[float]:
        caches = (self._asker(config, self._hiding(some)).cache for some in (torch.zeros_like(hidden), hidden))
        return [log_probability(self.index, cache, question, first.ids, at_once=config is DENSELY) for cache in caches]

    def _hiding(self, hidden: torch.Tensor) -> Callable[[int], GatherMaker]:
        return lambda layer: partial(HidingExecutor, hidden=hidden, sinks=self.index.split.sinks)

    def _asker(self, config: DecodeConfig, gather_makers: Callable[[int], GatherMaker]) -> Session:
        asker = Session.open(self.index, config, gather_makers)
        if appends(asker.cache.stored_layers):
            raise UsageError("--stream: a trace covers only the document's own tokens; leave it out")
        return asker

    def _about(self, answer: Answer) -> dict[str, Any]:
        """Return the trace's general facts: index, model, setting, answer with its sources, and all tokens."""
        manifest = self.index.artifact.manifest
        heads = self.index.artifact.context_rows(manifest.indexed_layers[0]).shape[0]
        return {
            "version": VERSION,
            "index": str(self.index.artifact.folder),
            "model": manifest.model.id,
            "method": self.config.attention.name,
            "budget": self.config.budget.value,
            "residual": self.config.attention.residual,
            "answer": answer.text,
            "sources": [asdict(source) for source in answer.sources],
            "n_context": manifest.split.tokens,
            "n_sinks": manifest.split.sinks,
            "n_middle": manifest.split.middle,
            "n_tail": manifest.split.tail,
            "passages": [{"start": start, "tokens": list(texts)} for start, texts in self.passages],
            "answer_tokens": token_texts(self.index.tokenizer, answer.ids),
            "layers": list(manifest.indexed_layers),
            "kv_heads": heads,
        }

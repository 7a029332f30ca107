"""Compare a model's own attention with sparsekv's: before the prefill on a few tokens, after it over the stored rows.

The model's top logits at a few tokens are stored as the canary, and those at the last token as the probe.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from transformers import PreTrainedModel

from sparsekv.formats.errors import REBUILD, ArtifactError, IdentityError, SparsekvError, first_line
from sparsekv.formats.index.manifest import (
    COARSEST,
    PROBE_TOLERANCE,
    ROW_TOLERANCE,
    STORING_TOLERANCE,
    difference,
    is_over_exact,
    probe_tolerance,
    top_logits,
    why_logits_differ,
)
from sparsekv.formats.index.schema import CanaryToken, KVDtype, Manifest, Probe
from sparsekv.formats.models.quantised import checkpoint_of
from sparsekv.formats.models.rope import rope_depends_on_length
from sparsekv.indexing.capture.capture import Capture, ContextLayer, capture
from sparsekv.indexing.prefill.prefills import DensePrefill
from sparsekv.kernels.common.given_rows import (
    CalledCache,
    RowPair,
    Rows,
    logits_over_rows,
    pass_over_rows,
    routed_logits_over_rows,
    soft_caps,
    tokens_at,
    with_cache,
)
from sparsekv.kernels.common.hook import AttentionCall, alone, route_attention
from sparsekv.kernels.common.mask import UnsupportedAttentionError
from sparsekv.kernels.common.states import LayerKinds, State, layer_kinds, relative_distance, state_distance

TOKENS, DOCUMENT, CHUNK, SINGLE = 48, 32, 16, 2
"""Tokens of the trial in `preflight`, captured tokens among them, tokens per chunk, and last tokens that are fed one by
one."""
TOLERANCE = {torch.float32: 1e-2, torch.float16: 5e-2, torch.bfloat16: 1e-1}
"""Largest difference between the model's own logits and those over captured rows, relative to the largest logit.
Rounding stays below this value, even if a token is routed to another expert. A missing mask or scale does not."""


@torch.inference_mode()
def preflight(model: PreTrainedModel, input_ids: torch.Tensor, name: str) -> int:
    """Check on a few tokens of a prompt that attention over captured keys and values gives the model's own logits.

    Takes up to six forward passes over at most 48 tokens, and as many again if the first comparison fails. All
    processes that share a model must call this together.

    Args:
        input_ids: [N] int64, the prompt.

    Returns:
        The bytes of the states that the model's layers keep after any number of tokens.

    Raises:
        SparsekvError: the model lacks tokens of the prompt or does not run over captured rows; its layers differ in
            size or all have a sliding window; or the logits differ by more than rounding explains.
    """
    _check_ids(model, input_ids, name)
    ids = input_ids.repeat(-(-TOKENS // len(input_ids)))[:TOKENS].to(model.device)
    try:
        difference, state = _difference(model, ids, name)
        if difference > TOLERANCE[rounding_dtype(model)]:
            # Rounding may route a token to another MoE expert. That is unlikely for the reversed tokens too, so they
            # are tried before the model is refused.
            difference, _ = _difference(model, ids.flip(0), name)
    except SparsekvError as error:
        raise SparsekvError(f"{name} cannot be indexed: {error}; choose another model") from None
    if difference > TOLERANCE[rounding_dtype(model)]:
        lacks = "has a mask or a state that an index does not store"
        if layer_kinds(model.config).keeping:
            lacks = "has a mask that an index does not store, or cannot continue its states by several tokens at once"
        raise SparsekvError(
            f"{name} cannot be indexed: its logits over captured keys and values differ by {difference:.0%} "
            f"from the logits of a plain run, so it {lacks}; choose another model"
        )
    return state


def rounding_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return the dtype whose tolerances hold for a model: its own, or COARSEST for one with quantised weights."""
    return model.dtype if checkpoint_of(model) is None else COARSEST


def _check_ids(model: PreTrainedModel, input_ids: torch.Tensor, name: str) -> None:
    known, highest = len(model.get_input_embeddings().weight), int(input_ids.max())  # type: ignore[arg-type]
    if highest >= known:
        raise SparsekvError(
            f"the document has token id {highest}, and {name} has {known} embeddings: the tokenizer belongs "
            "to another model; put the model's own tokenizer into its folder"
        )


def _difference(model: PreTrainedModel, ids: torch.Tensor, name: str) -> tuple[float, int]:
    """Compute the largest difference between the model's own logits and those over captured rows for token ids [T].

    The difference is relative to the largest logit. It is 0 if logits are not finite, because the prefill detects and
    reports this. The second result is the size of the states after these tokens, in bytes. Raises SparsekvError if the
    model does not run over captured rows, or if all its layers have a sliding window.
    """
    with _tried("it does not run on token ids alone"), alone(model), soft_caps(model):
        own = model(input_ids=ids[None], use_cache=False).logits[0].float()
    # RoPE frequencies that depend on the sequence's length may change within the trial. Then all tokens of the trial
    # are captured at once.
    by_length = rope_depends_on_length(getattr(model.config.get_text_config(), "rope_parameters", None))
    document = TOKENS if by_length else DOCUMENT
    with _tried("its attention does not run over a cache of the keys and values that it attends to"):
        captured = capture(model, ids[:document], tail=1, chunk_size=CHUNK, marks={document})
        if all(captured.facts(layer).sliding_window is not None for layer in captured.layers):
            raise SparsekvError(
                f"every layer of {name} has a sliding window, and only layers that attend to all tokens are indexed"
            )
        answered = (
            []
            if by_length
            else _answer_logits(
                model, ids[document:], _AnswerCache(captured, layer_kinds(model.config), captured.states[document])
            )
        )
    found = torch.cat([captured.logits[None], *answered])
    difference = float((found - own[document - 1 :]).abs().max() / own.abs().max())
    state = sum(tensor.nbytes for tensor in captured.states[document].values())
    return difference if math.isfinite(difference) else 0.0, state


@contextmanager
def _tried(what: str) -> Iterator[None]:
    """Convert an exception of a model into a SparsekvError with the message `what` and the model's own reason.

    A SparsekvError, and an error for lack of memory, are raised unchanged.
    """
    try:
        yield
    except (SparsekvError, MemoryError, torch.OutOfMemoryError):
        raise
    except UnsupportedAttentionError as error:
        raise SparsekvError(error.reason) from None
    except Exception as error:  # a model is a program and may raise anything
        raise SparsekvError(f"{what} ({type(error).__name__}: {first_line(error)})") from None


class _AnswerCache(CalledCache):
    """A cache of captured rows, to which the tokens of an answer attend as in decoding.

    Each call of `attend` appends the call's keys and values.

    Raises:
        SparsekvError: the layers have heads of different sizes.
    """

    def __init__(self, captured: Capture, kinds: LayerKinds, state: State):
        rows = [captured.take(layer) for layer in captured.layers]
        if len(sizes := sorted({(len(one.keys), one.keys.shape[2]) for one in rows})) > 1:
            told = " and ".join(f"{heads} KV heads of {channels} channels" for heads, channels in sizes)
            raise SparsekvError(f"its layers differ in size ({told}), and an index needs one size")
        made = [ContextLayer(TOKENS, (one.keys, one.values)) for one in rows]
        self.rows = dict(zip(captured.layers, made, strict=True))
        super().__init__(layers=kinds.cache_layers(made, state))

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Compute dense attention [Hq, Q, D] to captured and appended rows."""
        return DensePrefill().attend(self.rows[call.layer].appended(call), 0)


def _answer_logits(model: PreTrainedModel, ids: torch.Tensor, cache: _AnswerCache) -> list[torch.Tensor]:
    """Compute the logits [T, vocabulary], in parts, after each of the token ids [T] that follow the cache's tokens.

    The last SINGLE tokens are fed one by one, the others in one forward pass.
    """
    parts, first = (ids[:-SINGLE], *ids[-SINGLE:].split(1)), TOKENS - len(ids)
    starts = accumulate((len(part) for part in parts[:-1]), initial=first)
    with route_attention(model, cache.attend):
        return [
            model(**tokens_at(model, part, start), **with_cache(model, cache)).logits[0].float()
            for part, start in zip(parts, starts, strict=True)
        ]


RUN = 8
"""Number of tokens of a canary run, in one forward pass. The median of the tokens' differences counts, so that a single
token that is routed to another expert has no effect."""
QUARTERS = (1, 2, 3, 4)
"""Ends of the canary runs, in quarters of the prompt."""


@dataclass(frozen=True)
class CanaryRun:
    """Logits [Q, vocabulary] of the Q tokens up to `position`, by the model's own attention and by sparsekv's.

    `state` is the model's recurrent state after these tokens, by its own attention; empty without one.
    """

    position: int
    own: torch.Tensor
    ours: torch.Tensor
    state: State = field(default_factory=dict)

    @property
    def difference(self) -> float:
        """Median over the tokens of the largest difference at a top logit of `own`, relative to the largest logit."""
        found = [difference(top_logits(own), ours) for own, ours in zip(self.own, self.ours, strict=True)]
        return float(torch.tensor(found).median())


def canary_positions(model: PreTrainedModel, tokens: int) -> list[int]:
    """Return the ascending positions at which canary runs end: the last token of each quarter of a prompt.

    If RoPE frequencies depend on the sequence's length (dynamic, longrope), only the last position is returned. A run
    in the middle would rotate its queries by other frequencies than the stored keys have.
    """
    if rope_depends_on_length(getattr(model.config.get_text_config(), "rope_parameters", None)):
        return [tokens - 1]
    return sorted({max(1, tokens * quarter // QUARTERS[-1]) - 1 for quarter in QUARTERS})


def canary_runs(model: PreTrainedModel, tokens: int, prefix_tokens: int) -> list[tuple[int, int]]:
    """Return for each canary run the number of tokens before the run, and the run's last position.

    If layers keep a state, runs begin after the `prefix_tokens` reused tokens, because states before are not known. A
    further run is then the last token alone, from the state that the index stores before this token. In a longer run,
    the int8 rows of the run's first tokens would change the state before the last token.
    """
    keeps = bool(layer_kinds(model.config).keeping)
    first = prefix_tokens if keeps else 0
    runs = ((max(0, first, last + 1 - RUN), last) for last in canary_positions(model, tokens))
    alone = [(tokens - 1, tokens - 1)] if keeps else []
    return [*((before, last) for before, last in runs if before <= last), *alone]


def run_canary(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    rows: Callable[[int], RowPair],
    states: Mapping[int, State],
    prefix_tokens: int = 0,
) -> list[CanaryRun]:
    """Run the tokens of each of `canary_runs` over the stored rows, by the model's own attention and by sparsekv's.

    Needs the memory of `rows` for a layer, and that of the model's attention for RUN tokens.

    Args:
        input_ids: [N] int64.
        rows: returns a layer's keys and values [Hk, N, D] as they are stored, on the model's device.
        states: the layers' states before each run, by the number of tokens before the run; empty without states.

    Raises:
        SparsekvError: the model's own attention cannot run over a cache with these rows.
    """
    runs = canary_runs(model, len(input_ids), prefix_tokens)
    return [_run(model, input_ids, before, last, rows, states.get(before, {})) for before, last in runs]


def _run(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    first: int,
    last: int,
    rows: Callable[[int], RowPair],
    state: State,
) -> CanaryRun:
    end, up_to_last = last + 1, _up_to(last, rows)
    try:
        own, after = pass_over_rows(model, input_ids[first:end], first, up_to_last, state)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        reason = str(error).partition("\n")[0]
        raise SparsekvError(
            "the model's own attention does not run over a cache of given keys and values, so sparsekv's "
            f"attention cannot be compared with it ({reason}); choose another model"
        ) from None
    ours = routed_logits_over_rows(
        model, input_ids[first:end], first, up_to_last, state, lambda call: DensePrefill().attend(call, 0)
    )
    return CanaryRun(last, own, ours, after)


def _up_to(last: int, rows: Callable[[int], RowPair]) -> Rows:
    """Return a function that returns a layer's rows of the tokens up to `last`."""

    def given(layer: int, own: RowPair) -> RowPair:
        keys, values = rows(layer)
        return keys[:, : last + 1], values[:, : last + 1]

    return given


def check_int8_state(run: CanaryRun, stored: State, model: PreTrainedModel, name: str) -> None:
    """Raise SparsekvError if int8 rows change the state after the document so much that no opening would accept it.

    Opening an index compares the stored state with the state that the last token leads to over the stored rows.

    Args:
        run: the canary run of the last token alone, over int8 rows.
        stored: the state after the last token, from the prefill over exact rows.
    """
    off = state_distance(run.state, stored, exact=False)
    if not off <= ROW_TOLERANCE * logit_tolerance(model, "int8"):
        raise SparsekvError(
            f"int8 storage changes the states of {name}'s layers too much: after the document's last token they are "
            f"{off:.1%} from those over exact keys and values; leave --kv-dtype int8 out"
        )


def compare_canary(
    manifest: Manifest, tokens: int, model: PreTrainedModel, input_ids: torch.Tensor, rows: Callable[[int], RowPair]
) -> None:
    """Compare an index's canary with the model's logits over the index's first rows, which a build reuses.

    The canary has the top logits of a few tokens, stored when the index was built. Does nothing for a model with layers
    that keep a state, because no state is stored before the canary's tokens. `compare_state` makes the comparison for
    such a model. Logits that are not finite end the comparison without an error, because they come from damaged rows,
    which the capture reports.

    Args:
        tokens: number of tokens whose rows are reused.
        input_ids: [N] int64, the build's prompt, which begins with the tokens of these rows.
        rows: returns a layer's keys and values [Hk, T, D] of at least these tokens, on the model's device.

    Raises:
        IdentityError: the logits differ beyond rounding, because another model computed the rows or the model attended
            differently.
    """
    tolerance = probe_tolerance(manifest, model.dtype, over_exact=is_over_exact(manifest))
    for token in () if layer_kinds(model.config).keeping else manifest.canary:
        if token.position >= tokens:
            continue
        at = token.position
        logits = logits_over_rows(model, input_ids[at : at + 1], at, _up_to(at, rows), {})[-1]
        if not bool(logits.isfinite().all()):
            return  # the rows are damaged, not the model; `capture` reports damaged rows later
        if not (off := difference(token, logits)) <= tolerance:
            raise IdentityError(
                f"the canary (logits of token {at:,} over the stored context)",
                f"{token.logits[0]:.4f} at its top",
                f"{off:.1%} away",
                f"{why_logits_differ(manifest)}, or {REBUILD}",
            )


def compare_state(
    manifest: Manifest, before: int, model: PreTrainedModel, input_ids: torch.Tensor, rows: Rows, state: State
) -> None:
    """Check a stored state before a build reuses it: compare stored keys and values with those computed from the state.

    The largest distance of a token in any layer counts. In an int8 index the largest of the layers' medians over tokens
    counts instead, because rounding may route a token to another expert.

    Args:
        before: number of tokens before the state.
        input_ids: [T] int64, tokens after the state that the build's prompt and the index have in common. The first RUN
            of these tokens are compared.
        rows: returns a layer's stored keys and values [Hk, before + T, D], on the model's device.
        state: the stored state.

    Raises:
        ArtifactError: keys or values differ beyond rounding, or the state does not fit the model.
    """
    tokens = input_ids[:RUN]
    wrong = f"the state after {before:,} tokens of the index, from which this build would continue,"
    try:
        _, distances = run_over_rows(model, tokens, before, rows, state)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, LookupError) as error:
        raise ArtifactError(f"{wrong} does not fit the model ({first_line(error)}); {REBUILD}") from None
    exact = manifest.kv_storage is None
    off = float(distances.amax() if exact else distances.median(1).values.amax())
    if not off <= ROW_TOLERANCE * probe_tolerance(manifest, model.dtype, over_exact=not exact):
        raise ArtifactError(f"{wrong} leads to keys and values that are {off:.1%} from the stored ones; {REBUILD}")


def run_over_rows(
    model: PreTrainedModel, input_ids: torch.Tensor, before: int, rows: Rows, state: State
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run tokens over stored rows, and compare their own stored rows with the rows that the model computes for them.

    Args:
        input_ids: [Q] int64, the tokens that run. They follow the first `before` tokens.
        rows: returns a layer's stored keys and values [Hk, >= before + Q, D], on the model's device.
        state: the state after the first `before` tokens, if layers keep a state.

    Returns:
        The logits [Q, vocabulary] by the model's own attention, and the relative distances [2 L, Q] of the tokens' keys
        and values in each of L layers.
    """
    compared: list[torch.Tensor] = []
    end = before + len(input_ids)

    def given(layer: int, own: RowPair) -> RowPair:
        keys, values = rows(layer, own)
        stored = keys[:, :end], values[:, :end]
        compared.extend(row_distances(ours, theirs[:, before:]) for ours, theirs in zip(own, stored, strict=True))
        return stored

    return logits_over_rows(model, input_ids, before, given, state), torch.stack(compared)


def logit_tolerance(model: PreTrainedModel, kv_dtype: KVDtype | None) -> float:
    """Return the largest relative difference of logits that counts as rounding of a model, or of rows in `kv_dtype`."""
    rounding = PROBE_TOLERANCE[rounding_dtype(model)]
    return rounding if kv_dtype is None else max(rounding, STORING_TOLERANCE[kv_dtype])


def check_distances(distances: torch.Tensor, model: PreTrainedModel, kv_dtype: KVDtype | None) -> None:
    """Raise ArtifactError if stored rows of a run differ from the model's rows by more than rounding explains.

    The largest of the medians over tokens counts, because rounding may route a token to another expert. For a single
    token in int8 the median over layers counts.

    Args:
        distances: [2 L, Q], as returned by `run_over_rows`.
        kv_dtype: the storage dtype of the rows; None for the model's dtype.
    """
    one_in_8_bits = kv_dtype is not None and distances.shape[1] == 1
    off = float(distances.median() if one_in_8_bits else distances.median(1).values.amax())
    if not off <= ROW_TOLERANCE * logit_tolerance(model, kv_dtype):
        raise ArtifactError(
            f"the keys and values from which this build would continue are {off:.1%} from those of the model, so "
            f"another model has computed them, or the same model with another config: use that model, or {REBUILD}"
        )


def row_distances(own: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Return each token's relative distance [T]: |own - stored| / |stored| of the token's rows in [Hk, T, D]."""
    return relative_distance(own, stored, (0, 2))


def judge_canary(runs: Sequence[CanaryRun], dtype: torch.dtype, name: str) -> tuple[list[CanaryToken], Probe]:
    """Check the canary runs, and return the top logits that an index stores: of the canary tokens, and the last token.

    Args:
        dtype: the dtype whose tolerance holds, see `rounding_dtype`.

    Raises:
        SparsekvError: sparsekv's attention differs from the model's own beyond rounding, or logits are not finite.
    """
    for run in runs:
        if not run.own.isfinite().all():
            raise SparsekvError(
                f"the logits of {name}'s own attention at token {run.position:,} are not finite; choose another model, "
                "or another --dtype"
            )
        if not run.difference <= PROBE_TOLERANCE[dtype]:
            raise SparsekvError(
                f"{name} attends with a mask or a bias that sparsekv does not support: at token {run.position:,} "
                f"the logits of its own attention are {run.difference:.1%} from those of sparsekv's attention "
                "over the same keys and values; choose another model"
            )
    tops = [(run.position, top_logits(run.own[-1])) for run in runs]
    last, probe = tops[-1]
    middle = [CanaryToken(position=at, token_ids=top.token_ids, logits=top.logits) for at, top in tops if at < last]
    return middle, probe

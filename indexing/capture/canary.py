"""The canary: a model's own attention over the rows that an index stores, compared with ours.

Capture and answers attend by the same arithmetic. A mask or a bias that it does not know is missing from both, and no
comparison of one with the other finds it. transformers' own attention has it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from sparsekv.formats.errors import IdentityError, SparsekvError
from sparsekv.formats.manifest import REBUILD
from sparsekv.formats.models.rope import rope_depends_on_length
from sparsekv.formats.probe import PROBE_TOLERANCE, difference, is_over_exact, probe_tolerance, top_logits
from sparsekv.formats.schema import CanaryToken, Manifest, Probe
from sparsekv.indexing.prefill.interface import DensePrefill
from sparsekv.kernels.common.given_rows import Pair, Rows, logits_over_rows
from sparsekv.kernels.common.hook import route_attention

RUN = 8
"""Tokens that run together. A rounding that turns one of them to another expert decides nothing: their median does."""
QUARTERS = (1, 2, 3, 4)
"""Where runs end, in quarters of the prompt."""


@dataclass(frozen=True)
class CanaryRun:
    """Logits [Q, vocabulary] of tokens up to `position`: by the model's own attention and by ours."""

    position: int
    own: torch.Tensor
    ours: torch.Tensor

    @property
    def difference(self) -> float:
        """The median over the tokens, relative to each token's largest logit."""
        found = [difference(top_logits(own), ours) for own, ours in zip(self.own, self.ours, strict=True)]
        return float(torch.tensor(found).median())


def canary_positions(model: PreTrainedModel, tokens: int) -> list[int]:
    """Positions, rising, at which runs end: the quarters of a prompt, its last token always among them.

    Where RoPE frequencies depend on the sequence's length (dynamic, longrope), a run in the middle would turn its
    queries by other frequencies than the stored keys have: there the last token's alone.
    """
    if rope_depends_on_length(getattr(model.config.get_text_config(), "rope_parameters", None)):
        return [tokens - 1]
    return sorted({max(1, tokens * quarter // QUARTERS[-1]) - 1 for quarter in QUARTERS})


def run_canary(model: PreTrainedModel, input_ids: torch.Tensor, rows: Callable[[int], Pair]) -> list[CanaryRun]:
    """Run the tokens before each of the canary's positions over the stored rows, by the model's attention and by ours.

    Memory: what `rows` allocates for a layer, and what the model's attention does for RUN tokens.

    Args:
        input_ids: [N] int64.
        rows: returns a layer's keys and values [Hk, N, D] as they are stored, on the model's device.

    Raises:
        SparsekvError: the model's own attention cannot run over given rows.
    """
    return [_run(model, input_ids, last, rows) for last in canary_positions(model, len(input_ids))]


def _run(model: PreTrainedModel, input_ids: torch.Tensor, last: int, rows: Callable[[int], Pair]) -> CanaryRun:
    first, end = max(0, last + 1 - RUN), last + 1
    up_to_last = _up_to(last, rows)
    try:
        own = logits_over_rows(model, input_ids[first:end], first, up_to_last)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
        reason = str(error).partition("\n")[0]
        raise SparsekvError(
            f"the model's own attention does not run over a cache of given rows, so that ours cannot be compared with "
            f"it ({reason}); choose another model"
        ) from None
    with route_attention(model, lambda call: DensePrefill().attend(call, 0)):
        ours = logits_over_rows(model, input_ids[first:end], first, up_to_last)
    return CanaryRun(last, own, ours)


def _up_to(last: int, rows: Callable[[int], Pair]) -> Rows:
    """The rows of the tokens up to `last`."""

    def given(layer: int, own: Pair) -> Pair:
        keys, values = rows(layer)
        return keys[:, : last + 1], values[:, : last + 1]

    return given


def compare_canary(
    manifest: Manifest, tokens: int, model: PreTrainedModel, input_ids: torch.Tensor, rows: Callable[[int], Pair]
) -> None:
    """Compare the canary of an index with what a model makes of the first rows, which a build takes over from it.

    Args:
        tokens: how many rows are taken over.
        input_ids: [N] int64, the build's prompt, which begins with the tokens of these rows.
        rows: returns a layer's keys and values [Hk, T, D] of at least these tokens, on the model's device.

    Raises:
        IdentityError: the logits differ beyond rounding: another model made the rows, or one that attended otherwise.
    """
    tolerance = probe_tolerance(manifest, model.dtype, over_exact=is_over_exact(manifest))
    for token in manifest.canary:
        if token.position >= tokens:
            continue
        at = token.position
        logits = logits_over_rows(model, input_ids[at : at + 1], at, _up_to(at, rows))[-1]
        if not (off := difference(token, logits)) <= tolerance:
            raise IdentityError(
                f"the canary (logits of token {at:,} over the stored context)",
                f"{token.logits[0]:.4f} at its top",
                f"{off:.1%} away",
                "these are other weights, or the model masks other tokens than it did: use the model it was built with "
                f"(--model {manifest.model.id}), or {REBUILD}",
            )


def judge_canary(runs: Sequence[CanaryRun], dtype: torch.dtype, name: str) -> tuple[list[CanaryToken], Probe]:
    """The runs' top logits that an index stores: of the middle's last tokens, and of the prompt's.

    Args:
        name: what error messages call the model.

    Raises:
        SparsekvError: ours differs from the model's own attention beyond rounding, or its logits are not finite.
    """
    for run in runs:
        if not run.own.isfinite().all():
            raise SparsekvError(
                f"the logits of {name}'s own attention at token {run.position:,} are not finite; choose another model, "
                "or another --dtype"
            )
        if not run.difference <= PROBE_TOLERANCE[dtype]:
            raise SparsekvError(
                f"{name} attends by a mask or a bias that an index would not follow: at token {run.position:,} the "
                f"logits of its own attention are {run.difference:.1%} from those of ours over the same keys and "
                "values; choose another model"
            )
    tops = [(run.position, top_logits(run.own[-1])) for run in runs]
    middle = [CanaryToken(position=at, token_ids=top.token_ids, logits=top.logits) for at, top in tops[:-1]]
    return middle, tops[-1][1]

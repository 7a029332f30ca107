"""Configs that determine which tokens of the document a question and its answer attend to.

A guard limits the missed mass: the attention mass of tokens that a step does not attend to individually.

The missed mass is estimated from softmax denominators. The numerator is the sum of N_i exp(q C_i) over the clusters i
of unselected tokens, for a query q and a cluster of N_i tokens with centroid C_i. The denominator is the sum over all
rows and clusters (Multipole Attention, equation 1). The estimate is usually too low: by Jensen's inequality, the N_i
tokens have at least N_i times the weight of their centroid.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from sparsekv.formats.errors import UsageError, check_at_least_one, check_choice
from sparsekv.formats.index.schema import LayerFacts
from sparsekv.kernels.scores.logits import attention_logits
from sparsekv.runtime.cache.kv_store import PLACEMENTS
from sparsekv.runtime.selection.checked import code_of
from sparsekv.runtime.selection.interface import (
    DENSE,
    Budget,
    CentroidSegment,
    Method,
    MethodSpec,
    Queries,
    RowSet,
    Selection,
    Selector,
)
from sparsekv.runtime.selection.token_choice import LayerSharing

DOUBLINGS = 2  # maximum number of times that the guard doubles a budget before a head falls back to dense attention


def missed_share(
    rest: Sequence[CentroidSegment], query: torch.Tensor, total: torch.Tensor, facts: LayerFacts, *, attended: bool
) -> torch.Tensor:
    """Estimate the softmax share [Hk, Q] of unselected tokens, as the mean over the query heads of a KV head.

    Returns NaN if there are no centroids.

    Args:
        rest: centroids of the tokens that were not selected.
        query: [Hk, G, Q, D].
        total: [Hk, G, Q], the log-sum-exp of the logits of all attended rows and centroids.
        attended: whether the step attends to these centroids, so that `total` includes them.
    """
    if not rest:
        return torch.full_like(total[:, 0], torch.nan)
    logits = [attention_logits(query, part.keys, *facts.scaling) + part.log_counts[:, None] for part in rest]
    left = torch.cat(logits, -1).logsumexp(-1)
    whole = total if attended else torch.logaddexp(total, left)
    return (left - whole).exp().mean(1)


def estimates_missed(method: Method, *, residual: bool) -> bool:
    """Whether the missed mass can be estimated, from the method's own centroids or from the residual's."""
    return method.estimates_missed or (residual and not method.replaces())


def check_estimates_missed(option: str, form: MethodSpec) -> None:
    """Raise UsageError if the method's missed mass, which `option` needs, cannot be estimated."""
    if not estimates_missed(form.method, residual=form.residual):
        # A method that represents the other tokens itself takes no centroids of a residual.
        remedy = "use another method" if form.method.replaces() else "add --residual or use another method"
        raise UsageError(f"{option}: {form.name} cannot estimate how much attention it misses; {remedy}")


@dataclass(frozen=True)
class Attempt:
    """Results of a step at one budget.

    `missed` [Hk, Q] is the estimated missed mass. `rows` [Hk, Q] is the number of D-sized rows read of the middle and
    the index. `results` are the result tensors, each [Hk, Q, ...].
    """

    missed: torch.Tensor
    rows: torch.Tensor
    results: tuple[torch.Tensor, ...]

    def replaced_where(self, over: torch.Tensor, other: "Attempt") -> "Attempt":
        """Return an attempt with the results of `other` where `over` [Hk, Q] is True, elsewhere with this attempt's.

        Where `over` is True, the number of rows read is the sum over both attempts.
        """
        results = (
            torch.where(over.view(*over.shape, *[1] * (new.ndim - 2)), new, old)
            for old, new in zip(self.results, other.results, strict=True)
        )
        return Attempt(torch.where(over, other.missed, self.missed), self.rows + over * other.rows, tuple(results))


@dataclass(frozen=True)
class Outcome:
    """A step's results, and bool masks [Hk, Q] of the heads and queries for which the guard changed the attention.

    `raised`: the missed mass at the first budget was above the limit. `dense`: the head fell back to dense attention.
    """

    attempt: Attempt
    raised: torch.Tensor
    dense: torch.Tensor


@dataclass(frozen=True)
class Guard:
    """A limit on the missed mass, for each KV head and query of a step.

    Raises:
        UsageError: `share`, the limit, is not above 0 and below 1.
    """

    share: float

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise UsageError(f"--guard {self.share:g}: give a share between 0 and 1, such as 0.2")

    def enforce(
        self,
        attempt: Callable[[Budget], Attempt],
        dense: Callable[[torch.Tensor], Attempt],
        budget: Budget,
        middle: int,
    ) -> Outcome:
        """Run a step at a budget, and again at a doubled budget, up to DOUBLINGS times, while heads are over the limit.

        A head keeps its first results within the limit. Heads that stay over the limit use dense attention. A doubled
        budget of `middle` tokens or more is not tried. Each attempt costs one sync, because its result
        decides whether another attempt is needed.

        Args:
            attempt: runs the step at a budget.
            dense: runs dense attention for the heads where its argument [Hk] is True; other heads' results are ignored.
            budget: the budget of the first attempt.
            middle: number of middle tokens.
        """
        best, tokens = attempt(budget), budget.tokens(middle)
        raised = over = best.missed > self.share
        for _ in range(DOUBLINGS):
            tokens *= 2
            if tokens >= middle or not over.any():
                break
            best = best.replaced_where(over, attempt(Budget(tokens)))
            over = best.missed > self.share
        if over.any():
            best = best.replaced_where(over, dense(over.any(1)))
        return Outcome(best, raised, over)


@dataclass
class MissedMeter:
    """One layer's missed-mass meter, which sums over heads and queries since `reset`.

    `heads` is the number of pairs of a KV head and a query. `sums` [3] are sums over these pairs: of the missed mass,
    of `Outcome.raised` and of `Outcome.dense`.
    """

    guard: Guard | None
    heads: int = 0
    sums: torch.Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))

    def reset(self) -> None:
        self.heads, self.sums = 0, torch.zeros_like(self.sums)

    def add(self, outcome: Outcome) -> None:
        self.heads += outcome.raised.numel()
        parts = (outcome.attempt.missed, outcome.raised, outcome.dense)
        self.sums = self.sums.to(outcome.raised.device) + torch.stack([part.sum(dtype=torch.float64) for part in parts])

    def means(self) -> tuple[float, float, float]:
        """Return the means of `sums` over the pairs of a KV head and a query; one sync.

        At least one step must have been measured since `reset`.
        """
        missed, raised, dense = (self.sums / self.heads).tolist()
        return missed, raised, dense


MOST_SOURCES = 64
"""Maximum number of sources of an answer."""
QUESTION_BUDGET = "1024"
EVERYTHING = Budget(1.0)


@dataclass(frozen=True)
class Dense:
    """Dense attention to the whole document, instead of a method. It has no parameters."""

    name: ClassVar[str] = DENSE
    residual: ClassVar[bool] = False


@dataclass(frozen=True)
class Own:
    """Prefill config `own`: a question's tokens select by the same method and budget as the answer's tokens."""

    name: ClassVar[str] = "own"


@dataclass(frozen=True)
class QuestionPrefill:
    """Prefill config: a question's tokens select by another method and budget than the answer's tokens.

    Each chunk of `chunk_size` tokens has one selection. `name` is the method's name.

    Raises:
        UsageError: `chunk_size` is less than one.
    """

    name: str
    method: Method
    budget: Budget
    chunk_size: int = 128

    def __post_init__(self) -> None:
        check_at_least_one(self, "chunk_size")


@dataclass(frozen=True)
class DecodeConfig:
    """Decode config: how answers attend to a document. `plan_layer` makes the plan of each layer from this config.

    Args:
        attention: a method with its parameters, or dense attention.
        budget: number of middle tokens (those between sinks and tail) that a step attends to.
        layer_budgets: budgets of single layers, by layer index, that replace `budget`.
        question: prefill config of a question's tokens.
        guard: a limit, for each KV head, on the missed mass: the attention mass of tokens that a step does not attend
            to individually. None: no limit.
        gauge: measure the missed mass without a limit. With `guard` or `gauge`, steps are not captured as CUDA graphs
            and do not use fused kernels.
        placement: where the document's keys and values are stored: `device`, `host` (memory) or `disk`.
        dense_layers: number of the model's first layers that attend to all tokens, regardless of their budgets.
        dense_from: number of answers from which on a shared step attends to all tokens, because it is then faster.
            None: every step selects tokens.
        lossless: the method only drafts tokens, which dense attention verifies; see `runtime.decoding.drafting`.
        ahead: prefetch each step's rows, by a search with the previous step's query during the previous step.
        origin: source of the method and the budget, as text for the user, if the user did not choose them.

    Raises:
        UsageError: the placement is unknown; `guard` or `gauge` is set, but the method cannot estimate the missed mass;
            `dense_layers` is set, but the method itself determines its dense layers; or `lossless` is set together with
            `guard`, `gauge`, `ahead`, a `question` that is not `Dense`, or a method's option `stream` or `step`.
    """

    attention: MethodSpec | Dense
    budget: Budget = EVERYTHING
    layer_budgets: Mapping[int, Budget] = field(default_factory=dict)
    question: Dense | Own | QuestionPrefill = field(default_factory=Own)
    guard: Guard | None = None
    gauge: bool = False
    placement: str = "device"
    ahead: bool = False
    dense_layers: int = 0
    dense_from: int | None = None
    lossless: bool = False
    origin: str = ""

    def __post_init__(self) -> None:
        check_choice("--placement", self.placement, PLACEMENTS)
        if self.dense_layers and isinstance(getattr(self.attention, "method", None), LayerSharing):
            name = self.attention.name
            raise UsageError(
                f"--dense-layers {self.dense_layers}: {name} has dense layers of its own; leave the option out"
            )
        if self.measured and isinstance(self.attention, MethodSpec):
            check_estimates_missed(self.measured, self.attention)
        if self.lossless:
            self._check_lossless()

    def _check_lossless(self) -> None:
        method = getattr(self.attention, "method", None)
        others = {
            self.measured: bool(self.measured),
            "--ahead": self.ahead,
            "--prefill": not isinstance(self.question, Dense),
            **{f"--{name}": getattr(method, name, usual) != usual for name, usual in (("stream", False), ("step", 1))},
        }
        for option, given in others.items():
            if given:
                raise UsageError(
                    f"--lossless gives the answer of dense attention to all tokens and cannot be used with {option}; "
                    "leave one of them out"
                )

    def densely(self, origin: str = "") -> "DecodeConfig":
        """Return the config with dense attention instead of its method; `origin` says why, if not the user chose it."""
        return replace(self, attention=Dense(), budget=EVERYTHING, layer_budgets={}, dense_layers=0, origin=origin)

    @property
    def measured(self) -> str:
        """Option that requires measuring the missed mass: `--guard`, `--gauge` or an empty string."""
        return "--guard" if self.guard is not None else "--gauge" if self.gauge else ""

    @property
    def code(self) -> str | None:
        """The checksums of other packages whose methods answer or prefill questions; None if there are none."""
        used = (one.method for one in (self.attention, self.question) if isinstance(one, MethodSpec | QuestionPrefill))
        codes = (code_of(type(one)) for one in used)
        return " ".join(one for one in codes if one is not None) or None

    def budget_of(self, layer: int) -> Budget:
        return EVERYTHING if layer < self.dense_layers else self.layer_budgets.get(layer, self.budget)


class QuestionSearch:
    """Selects one layer's rows for a chunk of a question, as row indices in the layout of the answer's selector.

    Args:
        prefill: the question's method, budget and chunk size.
        selector: selector of the question's method.
        device: the selector's device.
        layout: the layout of the answer's selector, [Hk, M] int64: the middle position of each stored row. None: rows
            are stored in order of position.
    """

    def __init__(self, prefill: QuestionPrefill, selector: Selector, device: torch.device, layout: torch.Tensor | None):
        self.selector, self.budget, self.chunk_size = selector, prefill.budget, prefill.chunk_size
        self.device, self.rows_of = device, None if layout is None else layout.argsort(-1).to(device)

    def select(self, queries: Queries) -> Selection:
        """Return one selection for all queries [Hk, G, Q, D] of a chunk."""
        chosen = self.selector.select(queries.to(self.device), self.budget)
        rows, valid = chosen.rows.expand()
        for order in (self.selector.layout, self.rows_of):
            rows = rows if order is None else order[:, None].gather(-1, rows)
        lengths = None if valid is None else valid.long()
        return replace(chosen, rows=RowSet(rows, lengths, chosen.rows.capacity, log_weights=chosen.rows.log_weights))

"""Configs that determine which tokens of the document a question and its answer attend to."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from sparsekv.formats.errors import UsageError, check_at_least_one, check_choice
from sparsekv.runtime.attention.guard import Guard, check_estimates_missed
from sparsekv.runtime.cache.kv_store import PLACEMENTS
from sparsekv.runtime.selection.checked import code_of
from sparsekv.runtime.selection.interface import DENSE, Budget, Method, MethodSpec
from sparsekv.runtime.selection.token_choice import LayerSharing

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
        dense_from: number of answers in a shared step from which on the step attends to all tokens, because that is
            then faster. None: every step selects tokens.
        lossless: the method only drafts tokens, which dense attention verifies; see `runtime.decoding.lossless`.
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
        """Return the config with dense attention instead of its method; `origin` is a reason that the user is shown."""
        return replace(self, attention=Dense(), budget=EVERYTHING, layer_budgets={}, dense_layers=0, origin=origin)

    @property
    def measured(self) -> str:
        """Option that requires measuring the missed mass: `--guard`, `--gauge` or an empty string."""
        return "--guard" if self.guard is not None else "--gauge" if self.gauge else ""

    @property
    def code(self) -> str | None:
        """Checksums of the code of other packages whose methods this config uses; None if it uses none."""
        used = (one.method for one in (self.attention, self.question) if isinstance(one, MethodSpec | QuestionPrefill))
        codes = (code_of(type(one)) for one in used)
        return " ".join(one for one in codes if one is not None) or None

    def budget_of(self, layer: int) -> Budget:
        return EVERYTHING if layer < self.dense_layers else self.layer_budgets.get(layer, self.budget)

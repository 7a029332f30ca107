"""Options of the commands that answer questions: attention, sampling and batch size. Also the config changes that a
chat allows."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from sparsekv.cli.common.method_options import flag
from sparsekv.cli.common.options import (
    ATTENDED,
    PLACED,
    DeviceOption,
    DtypeOption,
    IndexOption,
    ModelOption,
    QuietOption,
    SpecialTokensOption,
    WeightsOption,
    names_of,
    share,
)
from sparsekv.cli.common.streams import outlive_reader
from sparsekv.cli.distributed.launch import refuse_with_ranks
from sparsekv.formats.device import choose_device
from sparsekv.formats.errors import UsageError, check_choice
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import AUTO
from sparsekv.runtime.attention.config import MOST_SOURCES, QUESTION_BUDGET, DecodeConfig, Dense, Own, QuestionPrefill
from sparsekv.runtime.attention.guard import Guard
from sparsekv.runtime.cache.kv_store import PLACEMENTS
from sparsekv.runtime.decoding.choose_config import attention_of, choose_config, dense_if_short, refuse_beside_dense
from sparsekv.runtime.decoding.compiled import MODES, WORTH_COMPILING, WORTH_JOINING
from sparsekv.runtime.selection.interface import DENSE, Budget, Method, methods
from sparsekv.runtime.selection.registry import methods_of, unread

if TYPE_CHECKING:  # only ranks need torch.distributed; transformers takes as long as all other imports
    from sparsekv.formats.distributed.group import Ranks
    from sparsekv.runtime.decoding.answer import Sampling


def _has_step(kind: type[Method] | type[Dense]) -> bool:
    """Whether a method can reuse a selection in the next decode steps."""
    return any(field.name == "step" for field in fields(kind))


def refuse_merged_heads(config: DecodeConfig) -> None:
    """Raise UsageError if the method of the answer or of the question selects the same tokens for all heads.

    With several ranks, each rank has only some of the heads.
    """
    for part in (config.attention, config.question):
        if not isinstance(part, Dense | Own) and part.method.merges_heads:
            others = sorted(name for name, method in methods().items() if not method.merges_heads)
            raise UsageError(
                f"{part.name} selects one set of tokens for all heads, and each of several processes has only some of "
                f"the heads; run without --gpus or torchrun, or use one of these methods: {', '.join(others)}"
            )


SAMPLING = "Sampling"

AT_ONCE = {"cpu": 16, "cuda": 64}
"""Maximum number of questions that `--batch-size auto` answers at once, by device type. On a GPU fewer are answered at
once if their keys and values do not fit into free memory."""

PlacementOption = Annotated[
    str,
    typer.Option(
        metavar="|".join(PLACEMENTS),
        help=(
            "Where the document's keys and values are kept: in the memory of the model's device (device), in "
            "main memory (host), or in the index's files (disk)."
        ),
        rich_help_panel=PLACED,
    ),
]
MaxNewTokensOption = Annotated[int, typer.Option(help="Longest answer, in tokens.", rich_help_panel=SAMPLING)]
RawOption = Annotated[bool, typer.Option("--raw", help="Put no chat template around the question.")]


def _sources(value: str | int) -> int:
    """Parse the number of sources of an answer. Raises UsageError unless it is a number from 1 to MOST_SOURCES."""
    text = str(value)
    if not text.isascii() or not text.isdigit() or not 0 < int(text) <= MOST_SOURCES:
        raise UsageError(f"--sources {text}: give a whole number from 1 to {MOST_SOURCES}")
    return int(text)


SourcesOption = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        parser=_sources,
        help="Show the N passages (up to 64) of the document that the answer attended to most, each with its file, its "
        "lines (in a PDF, its page), its share of this attention and its text. manual:77 is line 77 of the document.",
    ),
]
StatsOption = Annotated[
    bool, typer.Option("--stats", help="Print times and the share of keys and values that was read, even with --quiet.")
]


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Options for how answers attend to the document.

    Only fields annotated with a typer option become options of a command. Subclasses annotate further fields.
    `parameters` has the values of the methods' own options by name; None for an option that the user did not set.
    """

    method: Annotated[
        str | None,
        typer.Option(
            help="Method that selects the tokens to attend to, or `dense` for dense attention to all of them. Default: "
            "the method that `tune` found, or the index's first method.",
            autocompletion=names_of(methods, DENSE),
        ),
    ] = None
    budget: Annotated[
        str | None,
        typer.Option(
            help="Share (0.1, 10%) or number of the document's tokens to attend to. Default: the budget that `tune` "
            "found; else 0.1, and for codes 0.05 of up to 9,600 tokens between sinks and tail, 480 tokens of up to "
            "32,000, 0.015 of more.",
            show_default=False,
            rich_help_panel=ATTENDED,
        ),
    ] = None
    schedule: str | None = None
    residual: Annotated[
        bool,
        typer.Option(
            "--residual",
            help=(
                "Attend to cluster centroids in place of the tokens that the method would drop. codes and multipole "
                "do so without this option, with centroids of their own."
            ),
            rich_help_panel=ATTENDED,
        ),
    ] = False
    guard: float | None = None
    dense_layers: int = 0
    lossless: bool = False
    prefill: Annotated[
        str | None,
        typer.Option(
            metavar="dense|own|METHOD",
            help=(
                "Tokens that the question attends to: all (dense), those that --method selects within --budget "
                "(own), or those that METHOD selects. Default: dense, which reads the whole document once per "
                "question. With own, most methods answer fewer questions correctly. In eval this option is "
                "--question-prefill."
            ),
            rich_help_panel=ATTENDED,
            autocompletion=names_of(methods, DENSE, Own.name),
        ),
    ] = None
    prefill_budget: Annotated[
        str | None,
        typer.Option(
            help="Share or number of the document's tokens that each 128 tokens of the question attend to, with "
            f"--prefill METHOD. Default: {QUESTION_BUDGET}.",
            rich_help_panel=ATTENDED,
        ),
    ] = None
    placement: str = "device"
    ahead: bool = False
    parameters: dict[str, Any]

    def config(self, artifact: Artifact, *, gauge: bool = False) -> DecodeConfig:
        """Return the config for answers over an index. Raises the errors of `choose_config`, or UsageError for an
        option that contradicts another, or has no meaning for the model or for dense attention."""
        layers = len(artifact.manifest.layers)
        if not 0 <= self.dense_layers <= layers:
            raise UsageError(
                f"--dense-layers {self.dense_layers}: the model has {layers} layers; give a number from 0 to {layers}"
            )
        budget, parameters = self.budget, self.parameters
        if self.schedule is not None:
            budget, parameters = self._scheduled(artifact, self.schedule)
        config = choose_config(
            artifact,
            self.method,
            parameters,
            budget=budget,
            residual=self.residual,
            prefill=self.prefill,
            prefill_budget=self.prefill_budget,
            guard=None if self.guard is None else Guard(self.guard),
            gauge=gauge,
            placement=self.placement,
            ahead=self.ahead,
            dense_layers=self.dense_layers,
            lossless=self.lossless,
        )
        if isinstance(config.attention, Dense) and isinstance(config.question, QuestionPrefill):
            refuse_beside_dense({"--prefill": self.prefill})
        return config

    def _scheduled(self, artifact: Artifact, schedule: str) -> tuple[str, dict[str, Any]]:
        """Return the budget of `--schedule`, and the methods' parameters, in which `step` is that of `--schedule`.

        `step` is the number of decode steps per selection.

        Raises:
            UsageError: --budget or --step is given too, the text is not BUDGET-step-STEPS, or the method has no `step`.
        """
        if self.budget is not None or self.parameters.get("step") is not None:
            raise UsageError("--schedule sets --budget and --step together; leave those two out")
        found = re.fullmatch(r"(.+)-step-(\d+)", schedule)
        if found is None:
            raise UsageError(f"--schedule {schedule}: give BUDGET-step-STEPS, such as 0.15-step-4")
        name, kind = attention_of(artifact, self.method)
        if kind is Dense:
            refuse_beside_dense({"--schedule": schedule})
        if not _has_step(kind):
            owners = [one for one in methods_of(artifact) if _has_step(methods()[one])]
            other = f", or name a method of this index that has it: {', '.join(owners)}" if owners else ""
            raise UsageError(f"--schedule {schedule}: {name} has no --step; give --budget {found[1]} instead{other}")
        return found[1], self.parameters | {"step": int(found[2])}


def refuse_with_auto(others: Mapping[str, Any] | None = None, *, placement: str, prefill: str | None) -> None:
    """Raise UsageError for a placement, a prefill or another option that cannot be combined with `--method auto`.

    Args:
        others: values of other options, by option; None or False for an option that is not given.
    """
    refused = {option for option, value in (others or {}).items() if value not in (None, False)}
    if placement != "device":
        refused.add(f"--placement {placement}")
    if prefill not in (None, DENSE, Own.name):
        refused.add(f"--prefill {prefill}")
    for option in sorted(refused):
        raise UsageError(
            f"{option} cannot be combined with --method auto, which may take dense attention; name a method, or leave "
            f"{option.split()[0]} out"
        )


@dataclass(frozen=True, kw_only=True)
class TimedAttentionOptions(AttentionOptions):
    """Attention options with the method `auto`: the faster of dense attention and the default method.

    A command with these options calls `take_faster` if `by_time` is True.
    """

    method: Annotated[
        str | None,
        typer.Option(
            help="Method that selects the tokens to attend to, `dense` for dense attention to all of them, or `auto` "
            "for the faster of dense attention and the default method. auto measures a step of both on this machine, "
            "and keeps the times for later calls, unless the machine is busy. Default: the method that `tune` found, "
            "or the index's first method; on a GPU `dense` over a short document.",
            autocompletion=names_of(methods, DENSE, AUTO),
        ),
    ] = None

    @property
    def by_time(self) -> bool:
        """Whether the method is `auto`."""
        return self.method == AUTO

    @property
    def is_default(self) -> bool:
        """Whether the user set no option of the attention."""
        given = (getattr(self, field.name) != field.default for field in fields(self) if field.name != "parameters")
        return not any(given) and all(value is None for value in self.parameters.values())

    def config(self, artifact: Artifact, *, gauge: bool = False) -> DecodeConfig:
        """Return the config for answers, as in the base class; with `auto`, the config to compare with dense attention.

        Also raises UsageError for an option that cannot be combined with `auto`.
        """
        if not self.by_time:
            return super().config(artifact, gauge=gauge)
        others = {"--lossless": self.lossless, "--guard": self.guard, "--gauge": gauge, "--ahead": self.ahead}
        refuse_with_auto(others, placement=self.placement, prefill=self.prefill)
        return replace(self, method=None).config(artifact, gauge=gauge)

    def for_one_question(self, artifact: Artifact, device: str, *, gauge: bool = False) -> DecodeConfig:
        """Return the config for answers to one question at a time.

        If the user set no option of the attention, a GPU attends densely to a short document (`dense_if_short`).

        Args:
            device: the value of `--device`.
        """
        config = self.config(artifact, gauge=gauge)
        if not self.is_default or gauge or choose_device(device).type != "cuda":
            return config
        return dense_if_short(artifact, config)


@dataclass
class Choices:
    """Settings that a chat keeps when the user switches the method.

    Attributes:
        artifact: the index that the chat is about.
        budget: the value of the last /budget, or else of --budget; None: each method has its own default.
        parameters: the values of the methods' options, by name.
        residual: whether --residual is given.
        later: values of `sparsekv.toml` for options of the methods that the chat did not begin with, by name.
    """

    artifact: Artifact
    budget: Budget | None
    parameters: Mapping[str, Any]
    residual: bool
    later: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, options: AttentionOptions, artifact: Artifact, config: DecodeConfig, left_out: Mapping[str, Any]
    ) -> Self:
        """Return the settings that a command line gives.

        Args:
            config: the config that was made from the same options.
            left_out: values of `sparsekv.toml` that the method of this config does not use, by parameter.

        Raises:
            UsageError: the budget in `left_out` is not a budget.
        """
        budget, residual = None if options.budget is None else config.budget, options.residual
        if budget is None and (text := left_out.get("budget")) is not None:
            budget = Budget.parse(text)
        later = {name: value for name, value in left_out.items() if name in options.parameters}
        return cls(artifact, budget, options.parameters, residual or bool(left_out.get("residual")), later)

    def other_method(self, before: DecodeConfig, name: str) -> DecodeConfig:
        """Return a config for the method `name`, with the user's options for this method, and the user's budget if set.

        Attention of questions and placement are those of the config `before`. Raises UsageError if there is no such
        method, and the errors of `choose_config`.
        """
        name, kind = attention_of(self.artifact, name)
        own, dense = {one.name for one in fields(kind)}, kind is Dense
        kept, later = (
            {option: value for option, value in values.items() if option in own}
            for values in (self.parameters, self.later)
        )
        decodes = not isinstance(before.question, Own)
        asked = kept | later
        kept |= {option: later[option] for option in later if not unread(kind, option, asked, decodes=decodes)}
        residual = self.residual and not dense
        config = choose_config(self.artifact, name, kept, residual=residual, prefill=before.question.name)
        budget = config.budget if dense or self.budget is None else self.budget
        return replace(config, budget=budget, question=before.question, placement=before.placement)

    def other_budget(self, config: DecodeConfig, text: str) -> DecodeConfig:
        """Return the config with another budget, which then holds for all layers.

        Raises UsageError if the text is not a budget, or if the config uses dense attention.
        """
        if isinstance(config.attention, Dense):
            refuse_beside_dense({"/budget": text})
        return replace(config, budget=Budget.parse(text, "/budget"), layer_budgets={}, origin="")


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options for sampling an answer's tokens."""

    max_new_tokens: MaxNewTokensOption = 256
    temperature: Annotated[
        float,
        typer.Option(
            help=(
                "0: always the most likely token. Above 0: tokens are sampled, among those that --top-p and "
                "--top-k allow."
            ),
            rich_help_panel=SAMPLING,
        ),
    ] = 0.0
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Sample from the most likely tokens whose probabilities add up to this.", rich_help_panel=SAMPLING
        ),
    ] = None
    top_k: Annotated[
        int | None, typer.Option(help="Sample from the K most likely tokens.", rich_help_panel=SAMPLING)
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of sampling.", rich_help_panel=SAMPLING)] = 0

    def make(self) -> "Sampling":
        """Return the `Sampling` for the answers. Raises UsageError for an invalid value, with the option's name."""
        from sparsekv.runtime.decoding.answer import Sampling, check_sampling

        check_sampling(self, flag)
        return Sampling(**asdict(self))


@dataclass(frozen=True, kw_only=True)
class GenerateAttention(TimedAttentionOptions):
    """All attention options; `generate` offers each of them."""

    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="BUDGET-step-STEPS",
            help="Sets --budget and --step together: 0.15-step-4 means --budget 0.15 --step 4.",
            rich_help_panel=ATTENDED,
        ),
    ] = None
    guard: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            parser=share,
            help=(
                "Largest estimated share of its attention that a head may leave to centroids or drop. The budget "
                "of a head above this limit is doubled, at most twice; after that the head attends to all tokens."
            ),
            rich_help_panel=ATTENDED,
        ),
    ] = None
    dense_layers: Annotated[
        int,
        typer.Option(
            metavar="N",
            help=(
                "Attend to all tokens in the model's first N layers; Quest and others use 2. With --prefill METHOD, "
                "a question's tokens select by METHOD there, too. recall-report --by layer shows in which layers the "
                "error is largest."
            ),
            rich_help_panel=ATTENDED,
        ),
    ] = 0
    lossless: Annotated[
        bool,
        typer.Option(
            "--lossless",
            help="Give dense attention's own answer, up to rounding. Tokens are drafted from earlier text, and on a "
            "GPU by the method where that is faster. One pass of dense attention verifies several of them. --stats "
            "prints how many were accepted.",
            rich_help_panel=ATTENDED,
        ),
    ] = False
    placement: PlacementOption = "device"
    ahead: Annotated[
        bool,
        typer.Option(
            "--ahead",
            help="Prefetch: select the next step's tokens with this step's query, while this step runs.",
            rich_help_panel=PLACED,
        ),
    ] = False

    def config(self, artifact: Artifact, *, gauge: bool = False) -> DecodeConfig:
        """Return the config for answers, as in the base class. Also raises UsageError for an option that has no
        meaning for dense attention."""
        config = super().config(artifact, gauge=gauge)
        if isinstance(config.attention, Dense):
            placement = self.placement != "device" and self.placement
            given = {"--guard": self.guard, "--gauge": gauge, "--ahead": self.ahead, "--placement": placement}
            refuse_beside_dense(given | {"--dense-layers": self.dense_layers})
        return config


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Command-line options of `generate`."""

    ctx: typer.Context
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="The question; - for stdin.")] = None
    index: IndexOption = None
    prompt_file: Annotated[str | None, typer.Option(help="Read the question from a file in UTF-8.")] = None
    batch_file: Annotated[
        str | None,
        typer.Option(
            help="Answer every line of a file in UTF-8 (- for stdin), and print one line per answer. On a GPU, "
            "--method is then auto, unless an option of the attention is given."
        ),
    ] = None
    batch_size: Annotated[
        str,
        typer.Option(
            metavar="N|auto",
            help=(
                "How many questions of --batch-file to answer at once. They share each step's reads of the "
                f"document: all of them attend to the tokens that any of them selects. auto: {AT_ONCE['cpu']} on "
                f"a CPU, up to {AT_ONCE['cuda']} on a GPU, 1 if questions cannot be answered together."
            ),
        ),
    ] = "auto"
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help=(
                "With --batch-file and --json: print the answers that this file holds already, and append each "
                "new answer as soon as it is complete. The file must hold the answers to the first questions, in "
                "order, from the same index with the same settings. With --batch-size, answers depend on the "
                "questions answered at the same time, so some may differ from those of a single run."
            ),
        ),
    ] = None
    model: ModelOption = None
    attention: GenerateAttention
    sampling: SamplingOptions
    raw: RawOption = False
    special_tokens: SpecialTokensOption = False
    save_to: Annotated[
        Path | None,
        typer.Option(
            metavar="NAME.skv", help="Save document, question and answer as a new index, for the next question."
        ),
    ] = None
    sources: SourcesOption = None
    stats: StatsOption = False
    gauge: Annotated[
        bool,
        typer.Option(
            "--gauge",
            help="Print what --stats prints and, by layer, an estimate of the attention that the answer's steps (with "
            "--prefill own also the question) leave to centroids or drop. "
            "Decoding is slower: each step computes its logits once more and is not captured as a CUDA graph.",
        ),
    ] = False
    compiled: Annotated[
        str,
        typer.Option(
            "--compile",
            metavar="auto|on|off",
            help=(
                "Compile the model's layers with torch, except their attention. Decoding is faster, but starts two to "
                "five seconds later, and up to fifteen if torch's compiler must make kernels. auto: on a GPU, if the "
                f"answers may take {WORTH_COMPILING:,} steps or more, and without making kernels from "
                f"{WORTH_JOINING:,} on. A step decodes one token of each question that is answered at once."
            ),
        ),
    ] = "auto"
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print JSON, with unrounded numbers: an object, or with --batch-file one per line."
        ),
    ] = False
    device: DeviceOption = "auto"
    dtype: DtypeOption = "auto"
    weights: WeightsOption = "auto"
    quiet: QuietOption = False

    @property
    def with_stats(self) -> bool:
        """Whether to print times and the share of keys and values read."""
        return self.stats or self.gauge

    def config(self, artifact: Artifact, ranks: "Ranks | None") -> DecodeConfig:
        """Return the config for answers; with `by_time`, the config to compare with dense attention."""
        if self.batch_file is not None or ranks is not None:
            return self.attention.config(artifact, gauge=self.gauge)
        return self.attention.for_one_question(artifact, self.device, gauge=self.gauge)

    def by_time(self, ranks: "Ranks | None") -> bool:
        """Whether the faster of dense attention and the default method answers: with `--method auto`, and by default
        for the questions of `--batch-file` on a GPU, in one process."""
        by_default = self.batch_file is not None and self.attention.is_default and not self.gauge and ranks is None
        return self.attention.by_time or (by_default and choose_device(self.device).type == "cuda")

    def questions_at_once(self, config: DecodeConfig, ranks: "Ranks | None") -> int | None:
        """Return the number of questions to answer at once, from `--batch-size`; None: as many as fit (auto).

        With several ranks the number is 1.

        Raises:
            UsageError: the value is neither auto nor a whole number of at least 1, or the other options do not allow
                it. With several ranks: an option or the method works in one process only.
        """
        size = self.batch_size
        if ranks is not None:
            refused = {"--resume": self.resume, "--save-to": self.save_to, "--sources": self.sources}
            refuse_with_ranks(refused | {"--method auto": self.attention.by_time})
            refuse_merged_heads(config)
            if size not in ("auto", "1"):
                raise UsageError(
                    f"--batch-size {size}: with several ranks, questions are answered one at a time; leave "
                    "--batch-size out"
                )
            return 1
        if size == "auto":
            return None
        if self.batch_file is None:
            raise UsageError(f"--batch-size {size} has no effect without --batch-file; leave it out")
        if config.measured and size != "1":
            raise UsageError(
                f"--batch-size {size}: {config.measured} works only with one question at a time; give --batch-size 1"
            )
        if not size.isascii() or not size.isdigit() or int(size) < 1:
            raise UsageError(f"--batch-size {size}: give auto, or a whole number of at least 1")
        return int(size)

    @property
    def encoding(self) -> dict[str, bool]:
        """Keyword arguments of `question_ids`, which determine how a question becomes token ids."""
        return {"raw": self.raw, "special_tokens": self.special_tokens}

    def check(self, artifact: Artifact) -> None:
        """Raise UsageError if options exclude each other or need another one, or if the mode of --compile is unknown.

        With --save-to, also raise the errors of `refuse_unsavable`. The process then goes on if the reader of stdout
        closes the pipe, because the index is still to be saved.
        """
        if self.save_to is not None and self.batch_file is not None:
            raise UsageError("--save-to saves one question and its answer; leave --batch-file out")
        if self.save_to is not None:
            from sparsekv.cli.answering.session import refuse_unsavable  # the module imports transformers

            refuse_unsavable(artifact, self.save_to, self.dtype)
            outlive_reader()
        check_choice("--compile", self.compiled, MODES)
        if self.resume is not None and not (self.batch_file and self.as_json):
            raise UsageError("--resume needs --batch-file and --json; give both")

"""Print answers: streamed, one per line, or as JSON."""

import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from sparsekv.cli.answering.options import GenerateOptions
from sparsekv.cli.answering.resuming import AnswersFile
from sparsekv.cli.common.console import note, progress, say
from sparsekv.cli.common.questions import AnswerStream
from sparsekv.cli.common.stats import note_cut, print_sources, print_stats
from sparsekv.cli.common.streams import json_text
from sparsekv.formats.index.reader import Artifact
from sparsekv.runtime.attention.config import DecodeConfig, Dense, Own, QuestionPrefill
from sparsekv.runtime.benchmark.faster_attention import Choice
from sparsekv.runtime.decoding.answer import NO_ANSWER, Answer, ending_tokens
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.sampling import Sampling
from sparsekv.runtime.selection.interface import MethodSpec


@dataclass
class Output:
    """Prints the answers of a call: streamed, one per line, or as JSON. Each line may also go to a file.

    Args:
        of_batch: whether the questions are the lines of a file.
        stats: whether to print times too, to stderr.
        settings: the settings that decide an answer, from `settings_of`.
        resumed: the file of --resume, which also gets each line and may have lines of earlier runs; None without it.
        sources: whether to show the sources of each answer.
        choice: the choice of `--method auto`; None for any other method.
    """

    config: DecodeConfig
    sampling: Sampling
    as_json: bool
    of_batch: bool
    stats: bool
    quiet: bool
    settings: dict[str, Any]
    resumed: AnswersFile | None
    sources: bool = False
    choice: Choice | None = None
    stream: AnswerStream = field(default_factory=AnswerStream)

    @classmethod
    def open(
        cls,
        options: GenerateOptions,
        config: DecodeConfig,
        sampling: Sampling,
        artifact: Artifact,
        questions: Sequence[str],
        choice: Choice | None = None,
    ) -> Self:
        """Make the output that the options name, and lock the file of --resume.

        Raises the errors of `AnswersFile` and `AnswersFile.begin`.
        """
        shown = {} if options.sources is None else {"sources": options.sources}
        settings = settings_of(config, sampling, artifact, dtype=options.dtype, **options.encoding, **shown)
        resumed = None
        if options.resume is not None:
            resumed = AnswersFile(
                options.resume,
                options.batch_file,
                questions,
                identity(config),
                settings,
                default=None if choice is None else choice.method,
            )
            if done := resumed.begin():
                told = f"{len(done)} of {len(questions)} answers are in {options.resume}"
                note(told, quiet=options.quiet)
        of_batch, stats = options.batch_file is not None, options.with_stats
        about = config, sampling, options.as_json, of_batch, stats, options.quiet, settings, resumed
        return cls(*about, sources=bool(shown), choice=choice)

    def note_eos_tokens(self, index: OpenIndex) -> None:
        """Add the EOS tokens to the settings, once the model is loaded. Raises the errors of `check_eos_tokens`."""
        self.settings["eos_tokens"] = sorted(ending_tokens(index))
        if self.resumed is not None:
            self.resumed.check_eos_tokens(self.settings["eos_tokens"])

    @property
    def done(self) -> Sequence[str]:
        """The lines that earlier runs wrote."""
        return () if self.resumed is None else self.resumed.lines

    @property
    def _streamed(self) -> bool:
        return not (self.of_batch or self.as_json)

    def piece(self, text: str) -> None:
        """Print a piece of an answer if answers are streamed; otherwise do nothing, because `show` prints them."""
        if self._streamed:
            self.stream.add(text)

    def show(self, questions: Sequence[str], answers: Iterable[Answer], together: int) -> Answer:
        """Print the lines of earlier runs and the answers to the remaining questions. Returns the last answer.

        `together` is the most questions that share a decode step.
        """
        began, shown = time.perf_counter(), list[Answer]()
        for line in self.done:
            say(line)
        # If the user sees each answer arrive, no progress bar is needed.
        seen = sys.stdout.isatty() or (not self.of_batch and (sys.stderr.isatty() or not self.as_json))
        with self.stream.ending_lines(), progress(quiet=self.quiet or seen) as tell:
            for number, answer in enumerate(answers, len(self.done) + 1):
                self._print(questions[number - 1], answer, number, together)
                shown.append(answer)
                tell("answers", number, len(questions))
        if self.of_batch:
            self._total(shown, time.perf_counter() - began)
        return shown[-1]

    def _print(self, question: str, answer: Answer, number: int, together: int) -> None:
        """Print an answer, or only the end of its line if it was streamed; also append it to the file of --resume.

        Sources, times and notes follow on stderr if the options ask for them.
        """
        line = " ".join(answer.text.split())
        if self.as_json:
            line = json_text(self._record(question, answer))
        if self.resumed is not None:
            self.resumed.add(line)
        if self._streamed:
            self.stream.end()
        else:
            say(line)
        if self.sources and answer is not NO_ANSWER and not self.as_json:
            print_sources(answer, number if self.of_batch else None)
        if self.stats and answer is not NO_ANSWER:
            print_stats(answer, number if self.of_batch else None, together)
            untold = self.config.measured and not answer.layers
            note("nothing to estimate: an answer of one token takes no step", quiet=not untold)
        note_cut(answer, self.sampling.max_new_tokens, quiet=self.quiet or self.as_json or self.of_batch)

    def _record(self, question: str, answer: Answer) -> dict[str, Any]:
        """Return an answer as a JSON object, with the same keys for every question of a call."""
        shown = {"layers": bool(self.config.measured), "sources": self.sources}
        left_out = {"ids", *(name for name, some in shown.items() if not some)}
        kept = {name: value for name, value in asdict(answer).items() if name not in left_out}
        choice = {} if self.choice is None else {"auto": self.choice.record()}
        return {"question": question, **kept, **identity(self.config), "settings": self.settings, **choice}

    def _total(self, answers: Sequence[Answer], seconds: float) -> None:
        """Note how many answers of a batch were cut, if some were and --json is not given.

        With --stats, also note the speed of a batch of several questions.
        """
        asked, tokens = len(answers) - answers.count(NO_ANSWER), sum(one.generated_tokens for one in answers)
        cut = sum(one.finish_reason == "length" for one in answers)
        if cut and not self.as_json:
            told = f"answers that were cut (--max-new-tokens): {cut} of {asked}; --json says which"
            note(told, quiet=self.quiet)
        if self.stats and asked > 1:
            speed = f"{tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:.1f} a second in all"
            note(f"{asked} questions: {speed}", quiet=False)


def identity(config: DecodeConfig) -> dict[str, Any]:
    """Return the method's name and the budget of a config, which are fields of every answer's record."""
    return {"method": config.attention.name, "budget": config.budget.value}


def settings_of(config: DecodeConfig, sampling: Sampling, artifact: Artifact, **more: Any) -> dict[str, Any]:
    """Return the settings that decide an answer, besides those of `identity`, as the file of `--resume` stores them.

    `more` holds options by name.
    """
    parameters = asdict(config.attention.method) if isinstance(config.attention, MethodSpec) else {}
    layers = {str(layer): budget.value for layer, budget in config.layer_budgets.items()}
    return {
        "index": artifact.manifest.uuid,
        "residual": config.attention.residual,
        **asdict(sampling),
        "parameters": {name: _as_json(value) for name, value in parameters.items()},
        "layer_budgets": layers or None,
        "prefill": _in_words(config.question),
        "dense_layers": config.dense_layers or None,
        "guard": None if config.guard is None else config.guard.share,
        "ahead": config.ahead,
        "lossless": config.lossless,
        "code": config.code,
        **more,
    }


def _in_words(asking: Dense | Own | QuestionPrefill) -> str:
    """Describe the attention of a question's tokens: `dense`, `own`, or a method's name, budget and parameters.

    For a method, the text also has the number of tokens that share a selection.
    """
    if not isinstance(asking, QuestionPrefill):
        return asking.name
    options = "".join(f", {name} {value}" for name, value in asdict(asking.method).items())
    return f"{asking.name}, {asking.budget} of {asking.chunk_size}{options}"


def _as_json(value: Any) -> bool | int | float | str:
    """Return a parameter's value as JSON can represent it; a value of another type becomes text."""
    return value if isinstance(value, bool | int | float | str) else str(value)

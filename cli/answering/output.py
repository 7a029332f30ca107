"""Print answers: as they stream, one a line, or as JSON."""

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from sparsekv.cli.answering.resuming import AnswersFile
from sparsekv.cli.common.console import note, say
from sparsekv.cli.common.questions import AnswerStream
from sparsekv.cli.common.stats import print_stats
from sparsekv.cli.common.streams import json_text
from sparsekv.formats.index.reader import Artifact
from sparsekv.runtime.attention.config import DecodeConfig, Dense, Own, QuestionPrefill
from sparsekv.runtime.decoding.generate import NO_ANSWER, Answer, Sampling
from sparsekv.runtime.selection.interface import MethodSpec


@dataclass
class Output:
    """How the answers of a call are printed.

    as_json: an object a line. streamed: the answer's text was printed as it came. measured: what each layer leaves is
    known. stats: print times too, to stderr. resumed: the file that takes each line, too. settings: what else decides
    an answer. numbered: there are several, which stats tell apart.
    """

    config: DecodeConfig
    as_json: bool
    streamed: bool
    measured: bool
    stats: bool
    resumed: AnswersFile | None
    settings: dict[str, Any]
    numbered: bool
    answers: int = 0
    cut: int = 0
    blank: int = 0
    tokens: int = 0
    stream: AnswerStream = field(default_factory=AnswerStream)
    began: float = field(default_factory=time.perf_counter)

    def piece(self, text: str) -> None:
        """Print a piece of a streamed answer."""
        if self.streamed:
            self.stream.add(text)

    def answer(self, question: str, answer: Answer) -> None:
        """Print one answer, or its end where it was streamed."""
        line = " ".join(answer.text.split())
        if self.as_json:
            line = json_text(self._record(question, answer))
        if self.resumed is not None:
            self.resumed.add(line)
        if self.streamed:
            self.stream.end()
        else:
            say(line)
        self.cut += answer.finish_reason == "length"
        self.blank += answer is NO_ANSWER
        self.answers, self.tokens = self.answers + 1, self.tokens + answer.generated_tokens
        if self.stats and answer is not NO_ANSWER:
            before = 0 if self.resumed is None else len(self.resumed.lines)
            print_stats(answer, before + self.answers if self.numbered else None)
            untold = self.measured and not answer.layers
            note("nothing to estimate: an answer of one token takes no step", quiet=not untold)

    def _record(self, question: str, answer: Answer) -> dict[str, Any]:
        """An answer as a JSON object, with the same keys for every question of a call."""
        left_out = {"ids"} if self.measured else {"ids", "layers"}
        kept = {name: value for name, value in asdict(answer).items() if name not in left_out}
        return {"question": question, **kept, **identity(self.config), "settings": self.settings}

    def total(self, *, quiet: bool) -> None:
        """Note how many answers of a batch were cut, and how fast it was answered, if times are asked for."""
        if self.cut and not self.as_json:
            of = f"{self.cut} of {self.answers - self.blank}"
            note(f"answers that were cut (--max-new-tokens): {of}; --json says which", quiet=quiet)
        seconds = time.perf_counter() - self.began
        all_in_all = f"{self.tokens:,} tokens in {seconds:.1f} s, {self.tokens / seconds:.1f} a second in all"
        asked = self.answers - self.blank
        note(f"{asked} questions: {all_in_all}", quiet=not self.stats or asked < 2)


def identity(config: DecodeConfig) -> dict[str, Any]:
    """The fields of a config that each record has."""
    return {"method": config.attention.name, "budget": config.budget.value}


def settings_of(config: DecodeConfig, sampling: Sampling, artifact: Artifact, **more: Any) -> dict[str, Any]:
    """Settings that decide an answer, as a file to resume holds them; `more` are options by name."""
    parameters = asdict(config.attention.method) if isinstance(config.attention, MethodSpec) else {}
    layers = {str(layer): budget.value for layer, budget in config.layer_budgets.items()}
    return {
        "index": artifact.manifest.uuid,
        "residual": config.attention.residual,
        **asdict(sampling),
        "parameters": {name: _as_json(value) for name, value in parameters.items()},
        "layer_budgets": layers or None,
        "prefill": _in_words(config.question),
        "guard": None if config.guard is None else config.guard.share,
        "ahead": config.ahead,
        **more,
    }


def _in_words(asking: Dense | Own | QuestionPrefill) -> str:
    """The prefill of a question's tokens; with a method its budget, the tokens that share a choice, its parameters."""
    if not isinstance(asking, QuestionPrefill):
        return asking.name
    options = "".join(f", {name} {value}" for name, value in asdict(asking.method).items())
    return f"{asking.name}, {asking.budget} of {asking.chunk_size}{options}"


def _as_json(value: Any) -> bool | int | float | str:
    """A parameter's value as JSON has it; what it has no type for as text."""
    return value if isinstance(value, bool | int | float | str) else str(value)

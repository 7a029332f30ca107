"""Print answers: streamed, one per line, or as JSON. A resumed batch reads the answers that its file already has."""

import errno
import fcntl
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn, Self

from sparsekv.cli.answering.options import GenerateOptions
from sparsekv.cli.common.console import note, progress, say
from sparsekv.cli.common.questions import AnswerStream
from sparsekv.cli.common.stats import note_cut, print_sources, print_stats, why_cut
from sparsekv.cli.common.streams import json_text
from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.formats.index.reader import Artifact
from sparsekv.runtime.attention.config import DecodeConfig, Dense, Own, QuestionPrefill
from sparsekv.runtime.benchmark.faster_attention import Choice
from sparsekv.runtime.decoding.answer import NO_ANSWER, Answer, Sampling, ending_tokens
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.selection.interface import Budget, MethodSpec

FIRST_FIELD = '{"question": '
"""The beginning of each line of the file of `--resume`."""


def _refuse_questions_file(file: Path, questions: str | None) -> None:
    """Raise UsageError if the file of answers is also the file of questions."""
    with suppress(OSError):
        if questions is not None and os.path.samefile(file, questions):
            raise UsageError(f"--resume {file}: this is the file of the questions; name another file for the answers")


def _refuse_redirected_to(file: Path) -> None:
    """Raise UsageError if standard output is redirected to the file. Each answer would be written twice."""
    try:
        same = os.path.samestat(os.fstat(sys.stdout.fileno()), file.stat())
    except (OSError, ValueError):  # the file does not exist yet, or standard output has no descriptor
        return
    if same:
        raise UsageError(
            f"--resume {file}: standard output is redirected to the same file, and --resume itself writes the "
            "answers to it; leave the redirection out"
        )


def _same(found: Any, value: Any) -> bool:
    """Whether two values are equal in JSON.

    For Python's `==`, 1, 1.0 and true are equal too. But a budget of 1 is one token, and a budget of 1.0 is all tokens.
    """
    return json.dumps(found, sort_keys=True) == json.dumps(value, sort_keys=True)


def _differing(name: str, found: Any, value: Any) -> str:
    """Return the options of a stored setting that differ from the requested ones, as a user types them.

    A setting with several parameters has an option for each of them.
    """
    if isinstance(found, dict) and isinstance(value, dict):
        names = [one for one in found | value if not _same(found.get(one), value.get(one))]
        return " and ".join(_differing(one, found.get(one), value.get(one)) for one in names)
    option = f"--{name.replace('_', '-')}"
    if not _is_given(found):
        return f"without {_typed(option, value)}"
    other = f", not {_text(option, value)}" if _is_given(value) and value is not True else ""
    return f"with {_typed(option, found)}{other}"


def _setting(record: dict[str, Any], name: str, missing: Any) -> Any:
    """Return a field of a line or of its `settings`; `missing` if there is none."""
    held = record.get("settings")
    return (record | (held if isinstance(held, dict) else {})).get(name, missing)


def _is_given(value: Any) -> bool:
    return value is not None and value is not False


def _typed(option: str, value: Any) -> str:
    return option if value is True else f"{option} {_text(option, value)}"


def _text(option: str, value: Any) -> str:
    if option == "--budget" and isinstance(value, int | float):
        return str(Budget(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


OTHERWISE = {
    "index": "over another index",
    "code": "by another version of the method's package",
    "eos_tokens": "with other EOS tokens (the model's generation_config.json)",
    "layer_budgets": "with other budgets of single layers (a default of `sparsekv tune`)",
}
"""Phrases of messages about a setting that differs, by the setting's name.

Such a setting has no option, or its value is too long for a message.
"""


@contextmanager
def ignored(*numbers: int) -> Iterator[None]:
    """Within the context, ignore OSErrors with these errno values."""
    try:
        yield
    except OSError as error:
        if error.errno not in numbers:
            raise


class AnswersFile:
    """A file with one line of JSON for each question answered so far, in order, as `generate --json` prints it.

    Args:
        questions_file: the file of the questions, which must be another file.
        questions: all questions of the batch, including blank ones.
        setting: fields that every line must have, such as the method.
        settings: values that the field `settings` of every line must have.
        default: the index's default method, if `--method auto` has chosen it or dense attention; else None.

    Raises:
        UsageError: the file cannot be read, is not a regular file, or is the file of the questions; standard output
            goes to the file; a line is no answer, or has another question or other settings; or there are more lines
            than questions.
    """

    def __init__(
        self,
        file: Path,
        questions_file: str | None,
        questions: Sequence[str],
        setting: dict[str, Any],
        settings: dict[str, Any],
        *,
        default: str | None = None,
    ):
        _refuse_redirected_to(file)
        _refuse_questions_file(file, questions_file)
        self.file, self.settings, self.default = file, settings, default
        try:
            if file.exists() and not file.is_file():
                raise UsageError(
                    f"--resume {file}: this is not a regular file, so answers cannot be added to it; name another file"
                )
            content = file.read_bytes() if file.exists() else b""
        except OSError as error:
            raise UsageError(
                f"--resume {file} cannot be read: {error.strerror}; name a file that you may read"
            ) from None
        self.lines: list[str] = []
        self._lock: IO[bytes] | None = None
        # A last line without a newline was being written when the run was killed.
        *whole, unfinished = content.split(b"\n")
        for number, line in enumerate(whole, 1):
            self._check(line, number, questions, setting)
            self.lines.append(line.decode())
        self._found, self._whole = len(content), len(content) - len(unfinished)
        self._check_unfinished(unfinished, len(whole) + 1, questions)

    def _check_unfinished(self, line: bytes, number: int, questions: Sequence[str]) -> None:
        """Raise UsageError for an unfinished last line that is not the beginning of the next question's answer.

        Such a beginning is left when a run is killed, and `begin` removes it. Zero bytes at the end, which a power
        failure can leave, are ignored here and removed too.
        """
        begun = (FIRST_FIELD + json_text(questions[number - 1])).encode() if number <= len(questions) else b""
        line = line.rstrip(b"\0")
        if line and not (begun and line[: len(begun)] == begun[: len(line)]):
            raise UsageError(
                f"--resume {self.file}: line {number} is not an answer as --json prints it, nor the beginning of "
                "one; name another file"
            )

    def _check(self, line: bytes, number: int, questions: Sequence[str], setting: dict[str, Any]) -> None:
        try:
            record = json.loads(line.decode())
            question = record["question"]
        except (ValueError, TypeError, KeyError):
            raise UsageError(
                f"--resume {self.file}: line {number} is not an answer as --json prints it; name another file"
            ) from None
        if number > len(questions):
            raise UsageError(
                f"--resume {self.file}: the file has more answers than the {len(questions)} questions given; give "
                "all questions that it answers, or name another file"
            )
        if question != questions[number - 1]:
            raise UsageError(f"--resume {self.file}: line {number} answers another question; name another file")
        for name, value in (setting | self.settings).items():
            # A line that an earlier version wrote lacks the options that did not exist then.
            before = _setting(record, name, False if value is False else None)
            if not _same(before, value):
                self._refuse(number, name, before, value)

    def _refuse(self, number: int, name: str, before: Any, value: Any) -> NoReturn:
        other = OTHERWISE.get(name) or _differing(name, before, value)
        remedy = "give the settings of that line, or name another file"
        if name == "method":
            same = "leave --method out" if before == self.default else f"give --method {before}"
            remedy = f"{same}, or name another file"
            if self.default is not None:
                other = f"with --method {before}, and --method auto takes {value} now"
        raise UsageError(f"--resume {self.file}: line {number} was answered {other}; {remedy}")

    def check_eos_tokens(self, tokens: list[int]) -> None:
        """Raise UsageError if an answer of the resumed file was decoded with other EOS tokens than `tokens`.

        Lines of an earlier version, which did not record EOS tokens, are accepted.
        """
        for number, line in enumerate(self.lines, 1):
            before = _setting(json.loads(line), "eos_tokens", tokens)
            if before != tokens:
                self._refuse(number, "eos_tokens", before, tokens)

    def begin(self) -> list[str]:
        """Cut the file after its last whole line, and return its lines.

        Also lock the file against other runs until this process ends, if the file system has locks.

        Raises:
            UsageError: the file cannot be written, another run adds to it, or it has changed since it was read.
        """
        try:
            self._lock = self.file.open("ab")
            with ignored(errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):  # the file system has no locks
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self._lock.fileno()).st_size != self._found:
                raise UsageError(f"--resume {self.file} was changed by another process; run the same command again")
            self._lock.truncate(self._whole)
        except BlockingIOError:
            raise UsageError(
                f"--resume {self.file}: another run is adding answers to it; wait until that run ends, or stop it"
            ) from None
        except OSError as error:
            remedy = "create its folder, get permission to write there, or name another file"
            raise UsageError(f"--resume {self.file} cannot be written: {error.strerror}; {remedy}") from None
        return self.lines

    def add(self, line: str) -> None:
        """Append a line to the file; call `begin` first.

        Raises:
            SparsekvError: the file cannot be written.
        """
        try:
            with self.file.open("ab") as out:
                out.write(f"{line}\n".encode())
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            remedy = "free space or get permission there, and run the same command again"
            raise SparsekvError(f"--resume {self.file} cannot be written: {why}; {remedy}") from None


@dataclass
class Output:
    """Prints the answers of a call: streamed, one per line, or as JSON. Each line may also go to a file.

    Args:
        of_batch: whether the questions are the lines of a file.
        stats: whether to print times too, to stderr.
        settings: the settings that an answer depends on, from `settings_of`.
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
                identity(config) | {"sources": options.sources},
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
        """Print a piece of an answer if answers are streamed. Otherwise do nothing: `show` prints whole answers."""
        if self._streamed:
            self.stream.add(text)

    def show(self, questions: Sequence[str], answers: Iterable[Answer], together: int) -> Answer:
        """Print the lines of earlier runs and the answers to the remaining questions. Returns the last answer.

        `together` is the maximum number of questions that share a decode step.
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
        """Print a note with the number of cut answers of a batch, for each reason; none with --json or --quiet.

        With --stats, also note the speed of a batch of several questions.
        """
        asked, tokens = len(answers) - answers.count(NO_ANSWER), sum(one.generated_tokens for one in answers)
        reasons = Counter(why_cut(one, self.sampling.max_new_tokens) for one in answers)
        for why, cut in sorted(reasons.items()):
            told = f"answers that were cut ({why}): {cut} of {asked}; --json says which"
            note(told, quiet=self.quiet or self.as_json or not why)
        if self.stats and asked > 1:
            speed = f"{tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:.1f} a second in all"
            note(f"{asked} questions: {speed}", quiet=False)


def identity(config: DecodeConfig) -> dict[str, Any]:
    """Return the method's name and the budget of a config, which are fields of every answer's record."""
    return {"method": config.attention.name, "budget": config.budget.value}


def settings_of(config: DecodeConfig, sampling: Sampling, artifact: Artifact, **options: Any) -> dict[str, Any]:
    """Return all settings that an answer depends on, as the file of `--resume` stores them in the field `settings`.

    Method and budget are left out, because `identity` returns these. `options` are further options of the call, by
    name.
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
        "gauge": config.gauge,
        "ahead": config.ahead,
        "lossless": config.lossless,
        "code": config.code,
        **options,
    }


def _in_words(asking: Dense | Own | QuestionPrefill) -> str:
    """Return the attention of a question's tokens as text: `dense`, `own`, or a method's name, budget and parameters.

    For a method, the text also has the number of the question's tokens that share a selection.
    """
    if not isinstance(asking, QuestionPrefill):
        return asking.name
    options = "".join(f", {name} {value}" for name, value in asdict(asking.method).items())
    return f"{asking.name}, {asking.budget} of {asking.chunk_size}{options}"


def _as_json(value: Any) -> bool | int | float | str:
    """Return a parameter's value as JSON can represent it; a value of another type becomes text."""
    return value if isinstance(value, bool | int | float | str) else str(value)

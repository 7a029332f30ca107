"""Ask real models questions with known answers, and write a page of the right answers of each method.

    python docs/benchmarks/real_models.py text > help.txt
    python docs/benchmarks/real_models.py measure FOLDER TEXT --model NAME_OR_FILE [--model ...] [--length N ...]
    python docs/benchmarks/real_models.py page FOLDER [--note TEXT] > docs/benchmarks/board.md

`text` writes the text of the board: Python's help topics and two licences, twice, because the longest contexts have
more tokens than they have once.

`measure` runs commands of `sparsekv eval`, each of which asks questions of one task about contexts of one length that
it draws with one seed. Several commands run beside each other, also on one GPU. With two GPUs, run `measure` for each,
with other lengths and another CUDA_VISIBLE_DEVICES. After `--minutes` no command begins, and those that run end. The
same call goes on later: answers are kept in FOLDER, and none is computed twice. A length beyond a model's positions
stretches them by YaRN, at most to four times as many.

With `--turns` the questions about a context are the turns of a conversation, and the page compares turns.

`page` reads FOLDER's answers. Differences are to dense attention's answers to the same questions, in points, with the
95% interval of a bootstrap over contexts and their questions. A task in which dense attention scores less than 20% is
beyond the model. Such a task is listed and counts in no mean.
"""

import argparse
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path
from statistics import fmean
from typing import Any

from sparsekv.formats.models.load import load_description
from sparsekv.formats.models.rope import positions_of
from sparsekv.runtime.evaluation.table import Interval, interval, paired_difference
from sparsekv.runtime.selection.interface import Budget

SPARSEKV = [sys.executable, "-c", "from sparsekv.cli.main import main; main()"]
TASKS = (
    *(f"niah-{name}" for name in ("facts", "multikey", "multikey-2", "multikey-3", "multivalue", "multiquery")),
    *(f"scbench-{name}" for name in ("kv", "prefix-suffix", "mf", "many-shot", "vt")),
    *("niah-semantic", "multi-hop", "sums", "vt", "cwe", "fwe"),
)
METHODS = ("codes", "multipole", "squeezed", "csattention", "pqcache", "quest", "oracle", "window")
BUDGETS = ("1.5%", "5%")
LENGTHS = (4096, 16384, 30000, 64000, 120000)
CONTEXTS, QUESTIONS, GROUPS = 1, 8, 2
"""Contexts that one command draws, the questions about each, and the number of commands of a length and task."""
MOST_QUESTIONS = {"scbench-mf": 7}
"""Questions about a context of the tasks that have fewer."""
BEYOND = 20.0
"""Percentage of right answers by dense attention below which a task is beyond the model."""
HARD = ("niah-multikey-2", "niah-multikey-3")
ROOM = 1024
"""Positions that a question and its answer may take."""
TURNS = "-turns"
"""End of the names of files with the answers of conversations."""
FURTHEST = 4
"""Largest factor by which YaRN stretches a model's positions."""


@dataclass(frozen=True)
class Setting:
    """The options that all commands of a measurement share: each method at each budget, the dtype, and whether
    questions are turns of a conversation."""

    methods: tuple[str, ...] = METHODS
    budgets: tuple[str, ...] = BUDGETS
    dtype: str = "auto"
    turns: bool = False


@dataclass(frozen=True)
class Command:
    """One call of `sparsekv eval`: contexts of a task, of `length` tokens, that are drawn with `seed`, for a model."""

    model: str
    length: int
    seed: int
    task: str
    scaling: str | None
    setting: Setting = Setting()

    @property
    def name(self) -> str:
        return f"{name_of(self.model)}-{self.length}-{self.seed}-{self.task}{TURNS * self.setting.turns}"

    def line(self, text: Path) -> str:
        """Return the command as a line for a shell."""
        return shlex.join(["sparsekv", *self.arguments(str(text), f"{self.name}.eval", f"{self.name}.jsonl")])

    def arguments(self, text: str, work: str, answers: str) -> list[str]:
        """Return the arguments of `sparsekv` that write the answers to a file."""
        ways = [part for name in self.setting.methods for part in ("--method", name)]
        ways += [part for share in self.setting.budgets for part in ("--budget", share)]
        questions = MOST_QUESTIONS.get(self.task, QUESTIONS)
        drawn = ["--length", self.length, "--contexts", CONTEXTS, "--questions", questions, "--seed", self.seed]
        scaled = ["--rope-scaling", self.scaling] if self.scaling else []
        scaled += ["--turns"] if self.setting.turns else []
        kept = ["--work", work, "--answers", answers, "--dtype", self.setting.dtype, "--json", "-q"]
        return list(map(str, ["eval", text, "--model", self.model, "--task", self.task, *drawn, *ways, *scaled, *kept]))


def name_of(model: str) -> str:
    """Return the last part of a model's id or path, without the ending of a GGUF file."""
    return re.sub(r"\.gguf$", "", Path(model).name, flags=re.IGNORECASE)


def commands(
    models: Sequence[str], lengths: Sequence[int], tasks: Sequence[str], groups: int, setting: Setting
) -> Iterator[Command]:
    """Yield the commands of each model and length, shortest lengths first, so that stopped runs end with whole tables.

    A length that takes more than FURTHEST times a model's positions is left out. Exits if two models have one name.
    """
    if len(set(map(name_of, models))) < len(set(models)):
        raise SystemExit(f"two of {', '.join(models)} have one name, and so one file of answers; measure one of them")
    positions = {name: positions_of(load_description(name, None, lambda line: None)[0]) for name in models}
    for length, model in product(sorted(lengths), models):
        factor = math.ceil((length + ROOM) / (positions[model] or math.inf))
        if factor <= FURTHEST:
            scaling = f"yarn:{factor}" if factor > 1 else None
            each = product(range(groups), tasks)
            yield from (Command(model, length, seed, task, scaling, setting) for seed, task in each)


class Measurement:
    """Runs commands beside each other until the time is over. Each goes on in a work folder of its own."""

    def __init__(self, folder: Path, text: Path, minutes: float, workers: int):
        self.folder, self.text, self.workers = folder, text, workers
        self.ends = time.monotonic() + 60 * minutes
        folder.mkdir(parents=True, exist_ok=True)

    def run(self, wanted: Sequence[Command]) -> int:
        """Run the commands that have not ended yet; return the number of those that are left.

        A command of the same name that had another model, text or option is another command.
        """
        known = last_commands(self.folder)
        left = [one for one in wanted if known.get(one.name) != one.line(self.text) or not self._answers(one).exists()]
        with ThreadPoolExecutor(self.workers) as workers:
            ended = list(workers.map(self._run, left))
        return ended.count(False)

    def _answers(self, command: Command) -> Path:
        return self.folder / f"{command.name}.jsonl"

    def _run(self, command: Command) -> bool:
        """Run a command until it ends, and return True, or until the time is over, and return False."""
        seconds = self.ends - time.monotonic()
        if seconds <= 0:
            return False
        answers, began = self._answers(command), time.monotonic()
        arguments = command.arguments(str(self.text), str(self.folder / "work" / command.name), str(answers))
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        process = subprocess.Popen(
            [*SPARSEKV, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
        )
        try:
            _, told = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)  # its answers are on the disk
            process.communicate()
            return False
        if process.returncode == 0:
            with (self.folder / COMMANDS).open("a", encoding="utf-8") as file:
                file.write(f"{command.name}\t{command.line(self.text)}\n")
        took = time.monotonic() - began
        print(f"{command.name}: {'done' if process.returncode == 0 else told.strip()} in {took:.0f} s", flush=True)
        return process.returncode == 0


OF_A_FILE = {"--task", "--questions", "--seed", "--work", "--answers"}
"""Options whose values differ between the files of answers of one measurement."""
COMMANDS = "commands.txt"
"""Names of files of answers, each with the command that wrote it."""


def last_commands(folder: Path) -> dict[str, str]:
    """Return the last command that wrote each file of answers, by the file's name without ending."""
    file = folder / COMMANDS
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return dict(line.split("\t", 1) for line in lines)


Answers = list[dict[str, Any]]
NAME = re.compile(r"(.+)-(\d+)-(\d+)-([a-z][a-z0-9-]*)")
"""Model, length, seed and task in a file's name."""


def read(folder: Path, *, turns: bool = False) -> dict[tuple[str, int], Answers]:
    """Return all answers by model and length, of conversations or of questions asked alone; each has the seed of its
    context."""
    found: dict[tuple[str, int], Answers] = {}
    for file in sorted(folder.glob("*.jsonl")):
        named = NAME.fullmatch(file.stem)
        if named is None:
            raise SystemExit(f"{file} is no file of answers that this script names")
        model, length, seed = named.group(1, 2, 3)
        if file.stem.endswith(TURNS) != turns:
            continue
        lines = file.read_text(encoding="utf-8").splitlines()
        found.setdefault((model, int(length)), []).extend({**json.loads(line), "seed": int(seed)} for line in lines)
    return found


@dataclass(frozen=True)
class Row:
    """A method at a budget: right answers in percent, differences to dense attention, and what a step read."""

    method: str
    budget: float | int | None
    right: Interval
    difference: Interval | None
    hard: Interval | None
    same: float | None
    kv_fraction: float | None
    questions: int


def table(answers: Answers, reached: dict[str, float] | None = None) -> tuple[list[Row], dict[str, float]]:
    """Return the rows of a model at a length, and each task's right answers by dense attention in percent.

    There are no rows if all tasks are beyond the model. With `reached`, its percentages decide which tasks are.
    """
    ways: dict[tuple[str, float | None], Answers] = {}
    for one in answers:
        ways.setdefault((one["method"], one["budget"]), []).append(one)
    base = ways["dense", None]
    by_task = {
        task: fmean(one["score"] for one in some)
        for task, some in groupby(sorted(base, key=lambda one: str(one["task"])), lambda one: str(one["task"]))
    }
    within = [task for task, right in (reached or by_task).items() if right >= BEYOND]
    rows = []
    for (method, budget), given in ways.items() if within else ():
        dense = (method, budget) == ("dense", None)
        kept, beside = _of(given, within), _of(base, within)
        read = [one["kv_fraction"] for one in kept if one["kv_fraction"] is not None]
        rows.append(
            Row(
                method=method,
                budget=budget,
                right=interval(_scores(kept)),
                difference=None if dense else _difference(given, base, within),
                hard=None if dense else _difference(given, base, [task for task in within if task in HARD]),
                same=None if dense else _same(kept, beside),
                kv_fraction=fmean(read) if read else None,
                questions=len(kept),
            )
        )
    return rows, by_task


def _of(answers: Answers, tasks: Sequence[str]) -> Answers:
    """Return the answers of some tasks, in the same order for every method."""
    kept = [one for one in answers if one["task"] in tasks]
    return sorted(kept, key=lambda one: (one["task"], one["seed"], one["context"], one["question"]))


def _scores(answers: Answers) -> list[list[float]]:
    """Return the scores by context."""
    contexts = groupby(answers, lambda one: (one["task"], one["seed"], one["context"]))
    return [[one["score"] for one in some] for _, some in contexts]


def _difference(given: Answers, base: Answers, tasks: Sequence[str]) -> Interval | None:
    """Return the difference to dense attention on some tasks; None without tasks."""
    if not tasks:
        return None
    return paired_difference(_scores(_of(given, tasks)), _scores(_of(base, tasks)))


def _same(given: Answers, base: Answers) -> float:
    """Return the percentage of answers with the text of dense attention's answer."""
    return 100 * fmean(one["answer"] == other["answer"] for one, other in zip(given, base, strict=True))


INTRODUCTION = """\
`python docs/benchmarks/real_models.py` made this page. *Right* is the mean score in percent, over the questions of all
tasks within the model's reach: those in which dense attention scores at least 20%. Below a table, tasks beyond this
reach are marked `(beyond)`, and the table leaves them out. The columns *to dense* have differences to dense
attention in points, paired by question, with 95% intervals of a bootstrap over contexts and their questions. One of
these columns is of the tasks `niah-multikey-2` and `niah-multikey-3` alone. *Same text* is the share of answers
with the text of dense attention's answer. `window`, a control, reads only the prompt's first and last tokens.
Baselines differ from their authors' code: quest has no dense layers here
([all differences](../explanation/baselines.md))."""
HEADERS = ("method", "budget", "right, %", "to dense [95%]", "multi-key 2 and 3, to dense", "same text, %", "KV read")


def page(folder: Path, title: str, note: str) -> str:
    """Return the page: a note, and for each model and length a table, the tasks and the commands."""
    text = [f"# {title}", "", INTRODUCTION, "", *([note, ""] if note else [])]
    for (model, length), answers in read(folder).items():
        rows, by_task = table(answers)
        contexts = {(one["task"], one["seed"], one["context"]) for one in answers}
        text += [f"## {model}, {length:,} tokens", ""]
        within = rows[0].questions if rows else 0
        text += [f"{within} questions of tasks within the model's reach; {len(contexts)} contexts in all.", ""]
        text += [_line(HEADERS), _line(["---", "---:"] + ["---:"] * (len(HEADERS) - 2))] if rows else []
        text += [_line(_cells(row)) for row in rows]
        text += ["", _told(by_task), ""]
        text += _commands(folder, f"{model}-{length}-", turns=False)
    for (model, length), answers in read(folder, turns=True).items():
        text += [f"## {model}, {length:,} tokens, conversations", "", *_turns(answers)]
        text += _commands(folder, f"{model}-{length}-", turns=True)
    return "\n".join(text)


def _told(by_task: dict[str, float]) -> str:
    told = ", ".join(f"{task} {right:.0f}{' (beyond)' * (right < BEYOND)}" for task, right in by_task.items())
    return f"Dense attention by task, in percent: {told}."


def _turns(answers: Answers) -> list[str]:
    """Return a table with a row for each method and budget, and a column for each turn of the conversations."""
    rows, by_task = table(answers)
    if not rows:
        return [_told(by_task), ""]
    numbers = sorted({one["turn"] for one in answers})
    of_turn = {number: table([one for one in answers if one["turn"] == number], by_task)[0] for number in numbers}
    contexts = {(one["task"], one["seed"], one["context"]) for one in answers if by_task[one["task"]] >= BEYOND}
    heads = ("method", "budget", "to dense [95%]", *(f"turn {number}" for number in numbers))
    text = [
        f"{len(contexts)} conversations of tasks within the model's reach. Figures of turns are right answers of dense",
        "attention in percent, and the other rows' differences to them in points.",
        "",
        _line(heads),
        _line(["---", "---:"] + ["---:"] * (len(heads) - 2)),
    ]
    for place, row in enumerate(rows):
        each = [of_turn[number][place] for number in numbers]
        told = [f"{one.right.value:.1f}" if one.difference is None else f"{one.difference.value:+.1f}" for one in each]
        text.append(_line([row.method, _budget(row), _signed(row.difference), *told]))
    return [*text, "", _told(by_task), ""]


def _commands(folder: Path, beginning: str, *, turns: bool) -> list[str]:
    """Return the commands of the files of answers whose names begin so.

    Of files that differ only in seed and task, the first has its command, and the others are named by seed and task.
    """
    known = {name: line for name, line in sorted(last_commands(folder).items()) if name.startswith(beginning)}
    settings: dict[tuple[str, ...], list[str]] = {}
    for name, line in known.items():
        if name.endswith(TURNS) == turns:
            settings.setdefault(_setting(line), []).append(name)
    text = []
    for first, *others in settings.values():
        named = ", ".join(name.removeprefix(beginning) for name in others)
        more = f"The other files of answers (seed and task): {named}." if named else ""
        text += [f"Command of `{first}`: `{known[first]}`", "", more, ""]
    if len(settings) > 1:
        text += [f"The answers come from commands of {len(settings)} settings, and the table mixes them.", ""]
    return text


def _setting(line: str) -> tuple[str, ...]:
    """Return the words of a command without the options by which the commands of one measurement differ."""
    words = shlex.split(line)
    return tuple(word for before, word in zip(["", *words], words, strict=False) if not {before, word} & OF_A_FILE)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(row: Row) -> list[str]:
    return [
        row.method,
        _budget(row),
        f"{row.right.value:.1f}",
        _signed(row.difference),
        _signed(row.hard),
        "" if row.same is None else f"{row.same:.0f}",
        "" if row.kv_fraction is None else f"{row.kv_fraction:.3f}",
    ]


def _budget(row: Row) -> str:
    return "" if row.budget is None else str(Budget(row.budget))


def _signed(found: Interval | None) -> str:
    if found is None:
        return ""
    if found.low is None or found.high is None:
        return f"{found.value:+.1f}"
    return f"{found.value:+.1f} [{found.low:+.1f}, {found.high:+.1f}]"


def text() -> str:
    """Return the text from which the board's contexts are drawn."""
    root = Path(__file__).parents[2]
    topics = json.loads((root / "tests/data/python-topics.json").read_text(encoding="utf-8"))
    licences = [(root / name).read_text(encoding="utf-8") for name in ("LICENSE", "tests/data/PYTHON-LICENSE.txt")]
    return "\n\n".join(2 * [*topics.values(), *licences])


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    measure = parts.add_parser("measure", help="ask the questions that have no answers yet")
    measure.add_argument("folder", type=Path)
    measure.add_argument("text", type=Path, help="a long text, from which contexts are drawn")
    measure.add_argument("--model", action="append", required=True, help="as in `sparsekv eval`; repeatable")
    measure.add_argument("--length", action="append", type=int, help=f"repeatable; by default {LENGTHS}")
    measure.add_argument("--task", action="append", choices=TASKS, help="repeatable; by default all")
    measure.add_argument("--method", action="append", help=f"repeatable; by default {METHODS}")
    measure.add_argument("--budget", action="append", help=f"repeatable; by default {BUDGETS}")
    measure.add_argument(
        "--groups", type=int, default=GROUPS, help="commands of a model, length and task, each with a seed"
    )
    measure.add_argument("--turns", action="store_true", help="as in `sparsekv eval`")
    measure.add_argument("--dtype", default="auto", help="as in `sparsekv eval`; a GGUF is otherwise read in float32")
    measure.add_argument("--minutes", type=float, default=9.0)
    measure.add_argument("--workers", type=int, default=1, help="commands that run beside each other")
    measure.add_argument("--print", action="store_true", help="print the commands and run none")
    parts.add_parser("text", help="print the text of the board")
    shown = parts.add_parser("page", help="print the page of all answers in FOLDER")
    shown.add_argument("folder", type=Path)
    shown.add_argument("--title", default="Right answers of real models")
    shown.add_argument("--note", default="", help="a paragraph about the measurement: machine, commit, what is missing")
    return parser.parse_args()


def main() -> None:
    given = parsed()
    if given.part == "text":
        print(text())
        return
    if given.part == "page":
        print(page(given.folder, given.title, given.note))
        return
    setting = Setting(tuple(given.method or METHODS), tuple(given.budget or BUDGETS), given.dtype, given.turns)
    wanted = list(commands(given.model, given.length or LENGTHS, given.task or TASKS, given.groups, setting))
    if given.print:
        for one in wanted:
            print(one.line(given.text))
        return
    left = Measurement(given.folder, given.text, given.minutes, given.workers).run(wanted)
    print(f"{len(wanted) - left} of {len(wanted)} commands have ended")
    sys.exit(left > 0)


if __name__ == "__main__":
    main()

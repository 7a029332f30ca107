"""Deeds of `generate --resume` and `sparsekv.toml`: neither a setting's place nor earlier answers may change an
answer."""

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from support.command import run_here

from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.selection.interface import methods

from .case import draw_budget
from .commands import asking_options, is_read_back, placed, ran
from .deeds import deed
from .options import draw_options
from .oracles import expect
from .world import World

GENERATE = ("generate", "--index", "index.skv", "--json")
TIMES = ("tokens_per_second", "time_to_first_token")


@deed("resume otherwise", 3, asks=False)
def resume_otherwise(world: World, index: OpenIndex) -> None:
    """Check that answers of another setting in a file are reused only if this setting gives the same answers."""
    if not is_read_back(world):
        return
    random = Random(world.case.more)
    other, more = _otherwise(world, random)
    of_file, asking = asking_options(world, world.case.budget), [*asking_options(other, world.case.budget), *more]
    if random.random() < 0.5:
        of_file, asking = asking, of_file
    lines = random.choice([1, 2])
    batch = (*GENERATE, "--batch-file", "q.txt", "--batch-size", "1")
    with placed(world):
        Path("q.txt").write_text("why so\nq?\n")
        first, alone = (run_here(*batch, *options) for options in (of_file, asking))
        if first.code or alone.code:
            return
        Path("a.jsonl").write_text("".join(first.stdout.splitlines(keepends=True)[:lines]))
        resumed = run_here(*batch, *asking, "--resume", "a.jsonl")
        told = f"{of_file}, then {asking}: {resumed.code}, {resumed.stderr.strip()[-200:]}"
        if resumed.code == 0:
            expect(_untimed(resumed.stdout) == _untimed(alone.stdout), "resumed otherwise", told)
            expect(resumed.stdout == Path("a.jsonl").read_text(), "resumed file", told)
        else:
            expect(resumed.code == 2, "resumed otherwise", told)
            expect(_untimed(first.stdout) != _untimed(alone.stdout), "resumed the same", told)


def _otherwise(world: World, random: Random) -> tuple[World, list[str]]:
    """Return the case's world with another setting, or with the same one, and options that a case does not have."""
    case, kind = world.case, random.choice(["method", "options", "residual", "prefill", "layers", "answer", "more"])
    changes: dict[str, Any] = {}
    more: list[str] = []
    if kind == "method":
        usable = [name for name, one in methods().items() if not one.needs_index or name in dict(case.indexers)]
        changes = {"method": random.choice(usable), "options": (), "residual": False}
    elif kind == "options":
        changes = {"options": draw_options(random, methods()[case.method])}
    elif kind == "residual":
        changes = {"residual": not case.residual}
    elif kind == "prefill":
        changes = {"question_prefill": random.choice([None, "own", "oracle"]), "prefill_budget": None}
    elif kind == "layers":
        changes = {"dense_layers": random.choice([0, 1, case.layers])}
    elif kind == "answer":
        changes = {"answer": case.answer + random.choice([0, 1])}
    else:
        sampled = ["--temperature", "0.8", "--seed", str(random.randint(0, 2))]
        one_by_one = ["--guard", "0.1"], ["--gauge"], ["--ahead"] * (not case.ahead)
        more = random.choice([["--sources", "2"], *one_by_one, sampled])
    other = copy.copy(world)
    other.case = replace(case, **changes)
    return other, more


def _untimed(lines: str) -> list[dict[str, Any]]:
    """Return records of answers without their times."""
    records = [json.loads(line) for line in lines.splitlines()]
    return [{name: value for name, value in one.items() if name not in TIMES} for one in records]


@deed("project file", 3, asks=False)
def project_file(world: World, index: OpenIndex) -> None:
    """Check that options on the command line and in `sparsekv.toml` give the same answers; the command line comes
    first."""
    if not is_read_back(world):
        return
    case, random = world.case, Random(world.case.more)
    options = _by_name(asking_options(world, case.budget))
    defaults = {name: value for name, value in options.items() if name not in CALLS_OWN and random.random() < 0.5}
    typed = [word for name, value in options.items() if name not in defaults for word in _words(name, value)]
    others = {
        "budget": random.choice([draw_budget(random, case.middle), "0.03", "7"]),
        "schedule": "0.15-step-4",
        "max-new-tokens": str(case.answer + 2),
        "placement": "host",
        "method": random.choice([*methods(), "dense"]),
    }
    for name, value in others.items():
        held = "budget" if name == "schedule" else name
        if held in options and held not in defaults and random.random() < 0.4:
            defaults[name] = value
    with placed(world):
        plainly = ran(world, *GENERATE, *asking_options(world, case.budget), "--", world.question(0))
        if plainly.code:
            return
        shared = "" if random.random() < 0.5 else 'index = "index.skv"\n'
        Path("sparsekv.toml").write_text(shared + "[generate]\n" + "".join(map(_line, defaults.items())))
        command = ["generate", *(() if shared else ("--index", "index.skv")), "--json", *typed, "--", world.question(0)]
        outcome = run_here(*command)
        told = f"{Path('sparsekv.toml').read_text()!r} and {command}: {outcome.code}, {outcome.stderr.strip()[-300:]}"
        Path("sparsekv.toml").unlink()
    expect(outcome.code == 0, "project file", told)
    expect(_untimed(outcome.stdout) == _untimed(plainly.stdout), "project file", f"{told}: {outcome.stdout[:300]}")


CALLS_OWN = ("q", "model")
"""Options that stay on the command line. A model that a file names would have to be trusted first."""


def _by_name(words: Sequence[str]) -> dict[str, str | bool]:
    """Return the values of options by their long names, from the words of a command line."""
    found: dict[str, str | bool] = {}
    rest = [*words]
    while rest:
        name, equals, value = rest.pop(0).lstrip("-").partition("=")
        if equals:
            found[name] = value
        elif rest and not rest[0].startswith("-"):
            found[name] = rest.pop(0)
        else:
            found[name.removeprefix("no-")] = not name.startswith("no-")
    return found


def _words(name: str, value: str | bool) -> list[str]:
    dashes = "-" if len(name) == 1 else "--"
    if isinstance(value, bool):
        return [f"{dashes}{name}" if value else f"--no-{name}"]
    return [f"{dashes}{name}={value}"]


def _line(default: tuple[str, str | bool]) -> str:
    """Return a default as a line of TOML, with a number without quotes, as options of numbers need it."""
    name, value = default
    if isinstance(value, bool):
        return f"{name} = {str(value).lower()}\n"
    number = value.removeprefix("-").replace(".", "", 1).isdigit() and not value.endswith(".")
    return f"{name} = {value if number else json.dumps(value)}\n"

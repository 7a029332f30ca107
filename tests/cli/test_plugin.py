"""A method from an installed package: every command has it, and a package that does not fit is told in a line."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.command import EXECUTABLE, environment

from sparsekv.cli.common.method_options import with_method_options
from sparsekv.formats.errors import UsageError
from sparsekv.formats.registry import Registry

PACKAGE = Path(__file__).parents[1] / "plugin"
ENTRY_POINTS = "[sparsekv.methods]\n{name} = {value}\n"


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package, installed into a folder of its own."""
    source, target = tmp_path_factory.mktemp("source") / "plugin", tmp_path_factory.mktemp("installed")
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(target)]
    subprocess.run([*pip, str(source)], check=True, capture_output=True)
    return target


def run(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The installed command, with a folder of packages before its own."""
    return subprocess.run(
        [EXECUTABLE, *arguments],
        env=environment() | {"PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_command_has_a_packages_method(plugin: Path, place: Path) -> None:
    built = run(plugin, "build-index", "doc.txt", "--model", "model", "--method", "norms", "--norm-power", "1", "-q")
    assert built.returncode == 0, built.stderr
    manifest = json.loads((place / "doc.skv" / "manifest.json").read_text())
    assert manifest["methods"]["norms"]["parameters"]["norm_power"] == 1
    asked = run(plugin, "generate", "Why?", "--model", "model", "--method", "norms", "--max-new-tokens", "4", "--json")
    assert json.loads(asked.stdout)["method"] == "norms", asked.stderr
    report = run(plugin, "recall-report", "--method", "norms", "--skipped", "3", "--budget", "100%", "--json")
    (row,) = json.loads(report.stdout)["rows"]
    assert (row["method"], row["variant"]) == ("norms", "skipped=3")
    assert 0.9 < row["recall"] < 1
    timed = run(plugin, "bench", "--index", "doc.skv", "--method", "norms", "--runs", "2", "--warm", "--json", "-q")
    assert "norms" in {row["method"] for row in json.loads(timed.stdout)["rows"]}, timed.stderr
    tuned = run(plugin, "tune", "--target-recall", "0.1", "--method", "norms", "--json", "-q")
    assert [one["method"] for one in json.loads(tuned.stdout)["methods"]] == ["norms"], tuned.stderr
    assert "--skipped" in run(plugin, "generate", "--method", "norms", "--help").stdout


def test_without_the_package_its_method_is_told_as_unknown(plugin: Path, place: Path) -> None:
    assert run(plugin, "build-index", "doc.txt", "--model", "model", "--method", "norms", "-q").returncode == 0
    asked = run(place, "generate", "Why?", "--model", "model", "--method", "norms")
    assert (asked.returncode, asked.stdout) == (2, "")
    assert "error: no method 'norms'; there are: " in asked.stderr


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("quest", "broken:Quest", "two methods are called 'quest'"),
        ("odd", "broken:Missing", "method 'odd' of the installed package broken cannot be loaded (AttributeError"),
        ("odd", "broken:NUMBER", "method 'odd' of the installed package broken is no Method; mend or remove it"),
    ],
)
def test_a_package_that_does_not_fit_is_told_in_a_line(tmp_path: Path, name: str, value: str, told: str) -> None:
    facts = tmp_path / "broken-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(ENTRY_POINTS.format(name=name, value=value))
    code = "from sparsekv.runtime.selection.interface import Method\nNUMBER = 1\nclass Quest(Method):\n    pass\n"
    (tmp_path / "broken.py").write_text(code)
    outcome = run(tmp_path, "generate", "Why?")
    assert (outcome.returncode, outcome.stdout) == (2, "")
    (line,) = outcome.stderr.splitlines()
    assert told in line


@dataclass(frozen=True)
class _Number:
    rows: int = field(default=1, metadata={"help": "As a number."})


@dataclass(frozen=True)
class _Text:
    rows: str = field(default="", metadata={"help": "As text."})


@dataclass(frozen=True)
class _Own:
    budget: float = 0.0


def test_options_of_one_name_and_two_types_are_refused() -> None:
    def command(budget: str = "", **parameters: Any) -> None: ...

    with pytest.raises(UsageError, match=r"--rows is int for one and str for other"):
        with_method_options({"one": _Number, "other": _Text})(command)
    with pytest.raises(UsageError, match=r"--budget is str for every method and float for own"):
        with_method_options({"own": _Own})(command)


def test_a_name_is_known_once() -> None:
    registry: Registry[type] = Registry("thing", "sparsekv.runtime.methods")
    registry.register("one")(_Number)
    registry.register("one")(_Number)
    with pytest.raises(UsageError, match=r"two things are called 'one'"):
        registry.register("one")(_Text)

"""A method from an installed package: every command has it, and a package that does not fit is told in a line."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer
from support.command import EXECUTABLE, environment
from support.forked import Run, Zygote, zygote

from sparsekv.cli.common.method_options import with_options
from sparsekv.formats.errors import UsageError
from sparsekv.formats.registry import Registry
from sparsekv.runtime.selection.interface import Method, methods

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


@pytest.fixture(scope="module")
def with_plugin(plugin: Path) -> Zygote:
    """Starts commands of a process that has found the package."""
    return zygote().with_packages(plugin)


def run(commands: Zygote, *arguments: str) -> Run:
    """A command in the current folder."""
    return commands.run(*arguments, folder=Path.cwd(), limits={"AS": 1 << 40}, seconds=600)


def test_every_command_has_a_packages_method(with_plugin: Zygote, place: Path) -> None:
    built = run(
        with_plugin, "build-index", "doc.txt", "--model", "model", "--method", "norms", "--norm-power", "1", "-q"
    )
    assert built.code == 0, built.stderr
    manifest = json.loads((place / "doc.skv" / "manifest.json").read_text())
    assert manifest["methods"]["norms"]["parameters"]["norm_power"] == 1
    asked = run(
        with_plugin, "generate", "Why?", "--model", "model", "--method", "norms", "--max-new-tokens", "4", "--json"
    )
    assert json.loads(asked.stdout)["method"] == "norms", asked.stderr
    report = run(with_plugin, "recall-report", "--method", "norms", "--skipped", "3", "--budget", "100%", "--json")
    (row,) = json.loads(report.stdout)["rows"]
    assert (row["method"], row["variant"]) == ("norms", "skipped=3")
    assert 0.9 < row["recall"] < 1
    timed = run(
        with_plugin, "bench", "--index", "doc.skv", "--method", "norms", "--runs", "2", "--warm", "--json", "-q"
    )
    assert "norms" in {row["method"] for row in json.loads(timed.stdout)["rows"]}, timed.stderr
    tuned = run(with_plugin, "tune", "--target-recall", "0.1", "--method", "norms", "--json", "-q")
    assert [one["method"] for one in json.loads(tuned.stdout)["methods"]] == ["norms"], tuned.stderr
    assert "--skipped" in run(with_plugin, "generate", "--method", "norms", "--help").stdout


def test_answers_of_an_edited_package_are_not_resumed(plugin: Path, with_plugin: Zygote, place: Path) -> None:
    assert run(with_plugin, "build-index", "doc.txt", "--model", "model", "--method", "norms", "-q").code == 0
    Path("questions.txt").write_text("Why?\nWhen?\n")
    ask = "generate", "--batch-file", "questions.txt", "--method", "norms", "--max-new-tokens", "2", "--json", "-q"
    first = run(with_plugin, *ask, "--resume", "answers.jsonl")
    assert run(with_plugin, *ask, "--resume", "answers.jsonl").stdout == first.stdout
    (code,) = {json.loads(line)["settings"]["code"] for line in first.stdout.splitlines()}
    assert len(code) == 64
    source = plugin / "sparsekv_norms" / "__init__.py"
    text = source.read_text()
    source.write_text(f"{text}# edited\n")
    try:
        refused = run(with_plugin, *ask, "--resume", "answers.jsonl")
    finally:
        source.write_text(text)
    assert (refused.code, refused.stdout) == (2, "")
    assert "line 1 was answered by another version of the method's package" in refused.stderr


def test_without_the_package_its_method_is_told_as_unknown(with_plugin: Zygote, place: Path) -> None:
    assert run(with_plugin, "build-index", "doc.txt", "--model", "model", "--method", "norms", "-q").code == 0
    asked = run(zygote(), "generate", "Why?", "--model", "model", "--method", "norms")
    assert (asked.code, asked.stdout) == (2, "")
    assert "error: no method 'norms'; there are: " in asked.stderr
    assert run(zygote(), "generate", "Why?", "--model", "model", "--max-new-tokens", "2", "-q").code == 0
    Path("more.txt").write_text("Another line.")
    grown = run(zygote(), "append", "-i", "doc.skv", "more.txt", "--model", "model")
    assert "the index has the method norms, which is not installed; install its package" in grown.stderr


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("quest", "broken:Quest", "two methods are called 'quest'"),
        ("odd", "broken:Missing", "method 'odd' of the installed package broken cannot be loaded (AttributeError"),
        ("odd", "broken:Quest", "method 'odd': broken.Quest does not define prepare; add it to the class"),
        ("odd", "broken:NUMBER", "method 'odd' of the installed package broken is no Method; repair or remove it"),
    ],
)
def test_a_package_that_does_not_fit_is_told_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, told: str
) -> None:
    with pytest.raises(UsageError) as error:
        _found(tmp_path, monkeypatch, name, value)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ("page: int", "page of broken.Odd has no default; give it one"),
        ("page = 8", "page of broken.Odd has no annotation; annotate it with its type, or with ClassVar"),
        ("page: int = 'x'", "page of broken.Odd is of the type int, and its default is 'x'"),
        ("page: bool = 1", "page of broken.Odd is of the type bool, and its default is 1"),
        (
            "page: list[int] = field(default_factory=list)",
            "page of broken.Odd is of the type list[int]; options are",
        ),
        ("page: int | None = None", "page of broken.Odd is of the type int | None; options are of the types int, "),
        ("page: 'int' = 8", "page of broken.Odd has the annotation 'int' as text"),
        ("pages: tuple[int, ...] = ()", "pages of broken.Odd has the default (); give it a tuple of numbers"),
    ],
)
def test_a_field_that_can_be_no_option_is_told_when_the_package_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, told: str
) -> None:
    body = f"@dataclass(frozen=True)\nclass Odd(Method):\n    {field}\n"
    with pytest.raises(UsageError) as error:
        _found(tmp_path, monkeypatch, "odd", "broken:Odd", body)
    assert str(error.value).startswith(f"method 'odd' of the installed package broken: field {told}")


def test_a_class_with_fields_that_is_no_dataclass_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"package broken: broken\.Odd is not a dataclass; put @dataclass"):
        _found(tmp_path, monkeypatch, "odd", "broken:Odd", "class Odd(Method):\n    page: int = 8\n")


def test_what_is_not_an_option_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "    needs_index = True\n    revision: ClassVar[int] = 3\n    share: float = 1\n    _own = 5\n"
    body += "    def prepare(self, context): ...\n"
    known = _found(tmp_path, monkeypatch, "odd", "broken:Odd", f"@dataclass(frozen=True)\nclass Odd(Method):\n{body}")
    assert known["odd"].needs_index


def _found(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, body: str = ""
) -> dict[str, type[Method]]:
    """The methods that a process with the package finds."""
    known = methods()  # before the package is there
    _install_broken(folder, name, value, body)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    fresh: Registry[type[Method]] = Registry("method", "sparsekv.runtime.methods", "sparsekv.methods", Method)
    fresh.known = known
    return fresh()


def test_a_command_beside_a_package_that_does_not_fit_ends_in_a_line(tmp_path: Path) -> None:
    _install_broken(tmp_path, "odd", "broken:Missing")
    outcome = subprocess.run(
        [EXECUTABLE, "generate", "Why?"],
        env=environment() | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (outcome.returncode, outcome.stdout) == (2, "")
    (line,) = outcome.stderr.splitlines()
    assert "method 'odd' of the installed package broken cannot be loaded" in line


def _install_broken(folder: Path, name: str, value: str, body: str = "") -> None:
    """A package with one entry point, as pip would leave it in a folder."""
    facts = folder / "broken-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(ENTRY_POINTS.format(name=name, value=value))
    code = "from sparsekv.runtime.selection.interface import Method\nNUMBER = 1\nclass Quest(Method):\n    pass\n"
    imports = "from dataclasses import dataclass, field\nfrom typing import ClassVar\n"
    (folder / "broken.py").write_text(f"{imports}{code}{body}")


@dataclass(frozen=True)
class _Number:
    rows: int = field(default=1, metadata={"help": "As a number."})


@dataclass(frozen=True)
class _Text:
    rows: str = field(default="", metadata={"help": "As text."})


def test_options_of_one_name_and_two_types_are_refused() -> None:
    @dataclass(frozen=True)
    class Options: ...

    def command(options: Options) -> None: ...

    with pytest.raises(UsageError, match=r"--rows is int for one and str for other"):
        with_options(Options, {"one": _Number, "other": _Text})(command)


@pytest.mark.parametrize("name", ["budget", "plot", "no_cache", "as_json", "json", "help"])
def test_an_option_that_the_command_has_itself_is_refused(name: str) -> None:
    """Also where the command's option has another name in Python than on the command line, and whatever the types."""

    @dataclass(frozen=True)
    class Options:
        budget: Annotated[float, typer.Option()] = 0.0
        plots: Annotated[list[str], typer.Option("--plot", "-p")] = field(default_factory=list)
        cache: Annotated[bool, typer.Option()] = True
        as_json: Annotated[bool, typer.Option("--json/--text")] = False

    def command(options: Options) -> None: ...

    own = make_dataclass("Own", [(name, float, field(default=0.0))])
    option = f"--{name.replace('_', '-')}"
    with pytest.raises(
        UsageError, match=f"{option} of own is also an option of the command itself; rename the method's field"
    ):
        with_options(Options, {"own": own})(command)
    with_options(Options, {"own": own}, preset=fields(own))(command)


def test_a_name_is_known_once() -> None:
    registry: Registry[type] = Registry("thing", "sparsekv.runtime.methods")
    registry.register("one")(_Number)
    registry.register("one")(_Number)
    with pytest.raises(UsageError, match=r"two things are called 'one'"):
        registry.register("one")(_Text)

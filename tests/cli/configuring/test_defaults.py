"""Where an option's value comes from: the command line, the environment, the project's file, `tune`, the program."""

import json
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from support.command import fails, run_here
from typer.main import get_command

from sparsekv.formats.index.manifest import read_manifest, write_defaults
from sparsekv.formats.index.schema import Defaults, TuneTarget
from sparsekv.formats.models.find import EMBEDDED

ASK = ("generate", "Why?", "--json", "--max-new-tokens", "1", "-q")


@pytest.fixture
def tuned(place: Path) -> Path:
    """A folder whose index has a default that `tune` could have written, and whose model has been named."""
    setting = {
        "method": "squeezed",
        "variant": "",
        "parameters": {},
        "budget": 0.25,
        "layer_budgets": None,
        "residual": False,
        "target": TuneTarget(measure="recall", value=0.9),
        "calibration": 0.9,
        "held_out": 0.9,
        "kv_fraction": 0.3,
    }
    write_defaults(place / "doc.skv", read_manifest(place / "doc.skv"), Defaults.model_validate(setting))
    assert run_here("generate", "Why?", "--model", "model", "--max-new-tokens", "1", "-q").code == 0
    return place


def answer(*options: str) -> tuple[str, float]:
    """The method and the budget of an answer."""
    outcome = run_here(*ASK, *options)
    assert outcome.code == 0, outcome.stderr
    record = json.loads(outcome.stdout)
    return record["method"], record["budget"]


def test_command_line_then_file_then_what_tune_found_then_built_in(tuned: Path) -> None:
    assert answer() == ("squeezed", 0.25)
    Path("sparsekv.toml").write_text('[generate]\nmethod = "multipole"\nbudget = 0.5\n')
    assert answer() == ("multipole", 0.5)
    assert answer("--budget", "20%") == ("multipole", 0.2)
    assert answer("--method", "quest") == ("quest", 0.5)
    Path("sparsekv.toml").write_text('[generate]\nmethod = "quest"\n')
    assert answer() == ("quest", 0.1)


def test_command_line_then_environment_then_file(tuned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.skv", "b.skv", "c.skv"):
        shutil.copytree("doc.skv", name)
    Path("sparsekv.toml").write_text('index = "a.skv"\n')

    def index(*options: str) -> str:
        outcome = run_here("inspect", "--json", "-q", *options)
        assert outcome.code == 0, outcome.stderr
        return str(json.loads(outcome.stdout)["index"])

    assert index() == "a.skv"
    monkeypatch.setenv("SPARSEKV_INDEX", "b.skv")
    assert index() == "b.skv"
    assert index("--index", "c.skv") == "c.skv"
    monkeypatch.setenv("SPARSEKV_INDEX", "")
    assert index() == "a.skv"


def test_a_table_of_a_command_outranks_what_is_for_all(tuned: Path) -> None:
    shutil.copytree("doc.skv", "other.skv")
    Path("sparsekv.toml").write_text('index = "none.skv"\n[inspect]\nindex = "other.skv"\nverify = true\n')
    outcome = run_here("inspect", "--json", "-q")
    assert (json.loads(outcome.stdout)["index"], json.loads(outcome.stdout)["verified"]) == ("other.skv", True)


def test_a_question_that_is_like_an_option_for_help_has_the_defaults_too(tuned: Path) -> None:
    Path("sparsekv.toml").write_text("[generate]\nbudget = 0.5\n")
    outcome = run_here("generate", *ASK[2:], "--", "-h")
    assert json.loads(outcome.stdout)["budget"] == 0.5


def test_the_search_ends_at_a_home_that_is_a_link(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (place / "disk" / "home").mkdir(parents=True)
    (place / "home").symlink_to(place / "disk" / "home")
    (place / "disk" / "sparsekv.toml").write_text("budget = 1\n")
    monkeypatch.setenv("HOME", str(place / "home"))
    monkeypatch.chdir(place / "home")
    assert json.loads(run_here("config", "--json").stdout)["file"] is None


def test_the_nearest_file_up_to_the_home_counts(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = place / "home" / "project" / "sub"
    inner.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(place / "home"))
    monkeypatch.chdir(inner)
    (place / "sparsekv.toml").write_text("[generate]\nbudget = 0.1\n")
    assert json.loads(run_here("config", "--json").stdout)["file"] is None
    (place / "home" / "sparsekv.toml").write_text("[generate]\nbudget = 0.2\n")
    assert json.loads(run_here("config", "--json").stdout)["file"] == "../../sparsekv.toml"
    (place / "home" / "project" / "sparsekv.toml").write_text("[generate]\nbudget = 0.3\n")
    assert json.loads(run_here("config", "--json").stdout)["defaults"][-1]["value"] == 0.3


def test_paths_are_from_the_files_own_folder(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str((place / "model").resolve())
    assert run_here("generate", "Why?", "--model", model, "--max-new-tokens", "1", "-q").code == 0
    Path("sparsekv.toml").write_text('index = "doc.skv"\nmodel = "model"\n')
    (place / "sub").mkdir()
    monkeypatch.chdir(place / "sub")
    assert json.loads(run_here("inspect", "--json", "-q").stdout)["index"] == "../doc.skv"
    assert answer()[0] == "multipole"


def test_the_environment_names_a_model(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEKV_MODEL", "model")
    monkeypatch.setenv("SPARSEKV_DTYPE", "float32")
    monkeypatch.setenv("SPARSEKV_DEVICE", "cpu")
    assert run_here("build-index", "doc.txt", "-o", "new.skv", "--method", "squeezed", "-q").code == 0
    assert answer("--index", "new.skv")[0] == "squeezed"


def test_what_is_for_all_commands_does_not_stop_those_that_need_no_model(
    tuned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSEKV_MODEL", "model")
    monkeypatch.setenv("SPARSEKV_DTYPE", "float32")
    report = run_here("recall-report", "--method", "quest", "--budget", "5%", "-q")
    assert report.code == 0, report.stderr
    tuning = run_here("tune", "--target-recall", "0.2", "--method", "quest", "--dry-run", "-q")
    assert tuning.code == 0, tuning.stderr
    fails(2, "recall-report", "--model", "model", says=("--model model has no effect without --queries",))


def test_an_option_of_a_method_that_was_not_chosen_is_left_out(tuned: Path) -> None:
    Path("sparsekv.toml").write_text('[generate]\nmethod = "squeezed"\nlookup = "hierarchical"\npage-size = 8\n')
    assert answer("--method", "quest") == ("quest", 0.1)
    assert answer("--method", "multipole", "--lookup", "flat")[0] == "multipole"


def test_an_option_of_decode_steps_is_left_out_where_its_method_only_prefills_questions(tuned: Path) -> None:
    Path("sparsekv.toml").write_text("[generate]\nstream = true\nbuffer = 9\n")
    prefilling = ("--prefill", "multipole")
    assert answer("--method", "quest", *prefilling) == ("quest", 0.1)
    assert answer("--method", "multipole", *prefilling)[0] == "multipole"


def test_options_that_the_prefill_does_not_read_are_refused_beside_a_default_of_tune(tuned: Path) -> None:
    unread = ("--prefill", "snapkv", "--pool-size", "1", "--pooling", "average")
    fails(2, *ASK, *unread, says=("--pooling has no effect on --prefill snapkv with --pool-size 1",))
    told = "--stream has no effect on --prefill multipole in a question's prefill"
    fails(2, *ASK, "--prefill", "multipole", "--stream", says=(told,))
    assert answer("--prefill", "snapkv", "--pool-size", "1") == ("squeezed", 0.25)


def test_answers_by_other_budgets_of_single_layers_are_not_taken_over(tuned: Path) -> None:
    manifest = read_manifest(Path("doc.skv"))
    assert manifest.defaults is not None
    budgets = {layer: 0.2 + 0.1 * place for place, layer in enumerate(manifest.indexed_layers)}
    of_layers = manifest.defaults.model_copy(update={"layer_budgets": budgets})
    write_defaults(Path("doc.skv"), manifest, of_layers)
    Path("questions.txt").write_text("Why?\n")
    batch = ("generate", "--batch-file", "questions.txt", "--json", "--max-new-tokens", "1", "-q")
    resuming = (*batch, "--resume", "answers.jsonl")
    assert run_here(*resuming).code == 0
    told = "line 1 was answered with other budgets of single layers (a default of `sparsekv tune`); give the settings"
    fails(2, *resuming, "--method", "squeezed", "--budget", "25%", says=(told,))


def test_an_option_of_any_method_counts_with_the_method_auto(tuned: Path) -> None:
    Path("sparsekv.toml").write_text('[generate]\nlookup = "flat"\n')
    outcome = run_here(*ASK, "--method", "auto")
    assert json.loads(outcome.stdout)["auto"]["compared_with"] == "multipole", outcome.stderr


def test_an_option_outranks_defaults_of_those_that_it_excludes(tuned: Path) -> None:
    Path("sparsekv.toml").write_text(
        "[generate]\nbudget = 0.5\n[recall-report]\njson = true\nmethod = 'quest'\n[tune]\ntarget-recall = 0.2\n"
    )
    assert run_here("recall-report", "--csv", "-q").stdout.startswith("method,")
    assert run_here("tune", "--target-error", "0.9", "--method", "quest", "--dry-run", "-q").code == 0
    schedule = ("--schedule", "0.2-step-2", "--method", "csattention")
    outcome = run_here(*ASK, *schedule)
    assert "not built with 'csattention'" in outcome.error()
    assert outcome.error().endswith(", dense")


@pytest.mark.parametrize(
    ("file", "command"),
    [
        (
            "[generate]\nbudget = '5%'\nresidual = true\nguard = 0.1\nplacement = 'host'",
            (*ASK, "--method", "dense"),
        ),
        ("[generate]\nschedule = '0.15-step-4'\nahead = true\ngauge = true", (*ASK, "--method", "dense")),
        ("[generate]\ntemperature = 0.7\ntop-p = 0.9\ntop-k = 3", (*ASK, "--temperature", "0")),
        ("[tune]\ntarget-recall = 0.9\ndry-run = true", ("tune", "--reset")),
    ],
    ids=["dense", "dense-too", "greedy", "reset"],
)
def test_an_option_that_leaves_others_nothing_to_say_outranks_their_defaults(
    tuned: Path, file: str, command: tuple[str, ...]
) -> None:
    Path("sparsekv.toml").write_text(f"{file}\n")
    outcome = run_here(*command)
    assert outcome.code == 0, outcome.stderr


@pytest.mark.parametrize(
    ("command", "args", "file", "ignored"),
    [
        ("generate", ["Why?"], {"lossless": True, "budget": "5%", "prefill": "own"}, {"budget", "prefill"}),
        ("chat", [], {"placement": "host", "prefill": "own", "residual": True}, {"residual"}),
        ("chat", [], {"prefill": "quest", "budget": "5%"}, {"prefill", "budget"}),
        ("serve", [], {"placement": "host", "prefill": "quest", "budget": "5%"}, {"budget"}),
        ("trace", ["Why?"], {"truth": True, "prefill": "own"}, {"prefill"}),
    ],
)
def test_dense_attention_ignores_only_defaults_that_it_does_not_use(
    command: str, args: list[str], file: dict[str, Any], ignored: set[str]
) -> None:
    leaf = get_command(import_module(f"sparsekv.cli.{command}").app)
    leaf.callback = lambda **options: options
    with leaf.make_context(command, [*args, "--method", "dense"], default_map=file) as context:
        options = leaf.invoke(context)
    assert {name for name, value in file.items() if options[name] != value} == ignored


def test_a_default_model_gives_an_index_of_another_no_words(
    place: Path, embedded_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default model's tokenizer would decode the index's tokens to wrong words, without a warning."""
    monkeypatch.setenv("SPARSEKV_MODEL", EMBEDDED)
    outcome = run_here("inspect", "--json")
    assert "no words, only counts: tokenizer differs" in outcome.stderr
    assert not any(one["words"] for one in json.loads(outcome.stdout)["methods"]["squeezed"]["biggest"])


def test_help_is_the_same_everywhere_and_needs_no_valid_file(place: Path) -> None:
    before = run_here("generate", "--help").stdout
    Path("sparsekv.toml").write_text("[generate\n")
    assert run_here("generate", "--help").stdout == before
    assert run_here("--help").code == 0
    assert run_here("completion", "bash").code == 0


@pytest.mark.parametrize(
    ("variable", "value", "command", "says"),
    [
        ("SPARSEKV_INDEX", "gone.skv", ("generate", "Why?"), "(--index gone.skv comes from SPARSEKV_INDEX)"),
        ("SPARSEKV_DEVICE", "tpu", ("generate", "Why?"), "(--device tpu comes from SPARSEKV_DEVICE)"),
        ("SPARSEKV_DTYPE", "int3", ("generate", "Why?"), "(--dtype int3 comes from SPARSEKV_DTYPE)"),
        ("SPARSEKV_MODEL", "none", ("generate", "Why?"), "(--model none comes from SPARSEKV_MODEL)"),
        ("SPARSEKV_MODEL", "~nobody", ("generate", "Why?"), "(--model ~nobody comes from SPARSEKV_MODEL)"),
    ],
)
def test_an_error_names_the_variable_that_caused_it(
    place: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, command: tuple[str, ...], says: str
) -> None:
    monkeypatch.setenv(variable, value)
    assert run_here(*command).error().endswith(says)


@pytest.mark.parametrize(
    ("file", "command", "says"),
    [
        ('index = "gone.skv"\n', ("generate", "Why?"), "(--index gone.skv comes from sparsekv.toml, line 1)"),
        ("\n[generate]\nbudget = 0\n", ("generate", "Why?"), "(--budget 0 comes from sparsekv.toml, line 3)"),
        ("[generate]\npage-size = 8\n", ("generate", "Why?"), "(--page-size 8 comes from sparsekv.toml, line 2)"),
        (
            "[build-index]\nmethod = ['squeezed', 'quest']\n",
            ("build-index", "doc.txt"),
            "(--method squeezed quest comes from sparsekv.toml, line 2)",
        ),
        ("[build-index]\nmax-tokens = 0", ("build-index", "x"), "(--max-tokens 0 comes from sparsekv.toml, line 2)"),
        ("generate.budget = 0\n", ("generate", "Why?"), "(--budget 0 comes from sparsekv.toml, line 1)"),
        ("generate = {budget = 0}\n", ("generate", "Why?"), "(--budget 0 comes from sparsekv.toml)"),
    ],
)
def test_an_error_names_the_line_that_caused_it(place: Path, file: str, command: tuple[str, ...], says: str) -> None:
    Path("sparsekv.toml").write_text(file)
    outcome = run_here(*command)
    assert outcome.error().endswith(says)
    assert outcome.code in (1, 2)


def test_an_option_of_the_call_is_not_said_to_come_from_elsewhere(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEKV_INDEX", "none.skv")
    assert "comes from" not in run_here("generate", "Why?", "--index", "gone.skv").error()

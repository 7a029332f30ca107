"""`tune`, and `generate` that takes what it found."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.command import run_here, shell

from sparsekv.formats.errors import ArtifactError
from sparsekv.formats.index.manifest import read_manifest, write_defaults
from sparsekv.formats.index.schema import Defaults, TuneTarget

TUNE = ("tune", "--target-recall", "0.7", "--method", "squeezed", "--method", "quest", "--method", "window")
ASK = ("generate", "What is 7 times 7?", "--max-new-tokens", "4", "--model", "model", "--json")


def tuned(*more: str) -> dict[str, Any]:
    """Return the document that `tune --json` prints, with the options of TUNE and then `more`."""
    outcome = run_here(*TUNE, *more, "--json", "-q")
    assert outcome.code == 0, outcome.stderr
    return dict(json.loads(outcome.stdout))


def asked(*options: str) -> dict[str, Any]:
    """Return the document that `generate --json` prints."""
    outcome = run_here(*ASK, *options)
    assert outcome.code == 0, outcome.stderr
    return dict(json.loads(outcome.stdout))


def first_method() -> str:
    """Return the method that `generate` takes where an index has no default."""
    return next(iter(read_manifest(Path("doc.skv")).methods))


@pytest.fixture
def setting(place: Path) -> Defaults:
    """A default with budgets by layer and a parameter that is not its method's default."""
    manifest = read_manifest(place / "doc.skv")
    defaults = Defaults(
        method="quest",
        variant="",
        parameters={"page_size": 2},
        budget=0.5,
        layer_budgets={0: 0.25, 1: 0.75, 2: 0.5},
        residual=False,
        target=TuneTarget(measure="recall", value=0.9),
        calibration=0.91,
        held_out=0.9,
        kv_fraction=0.6,
    )
    write_defaults(place / "doc.skv", manifest, defaults)
    return defaults


def test_the_cheapest_setting_becomes_the_default_and_is_used(place: Path) -> None:
    before = asked()
    assert (before["method"], before["budget"]) == (first_method(), 0.1)
    found = tuned()
    best = found["methods"][0]
    assert best["holds"]
    assert best["held_out"] >= 0.7 - found["tolerance"]
    manifest = read_manifest(place / "doc.skv")
    assert manifest.defaults is not None
    assert manifest.defaults.model_dump(mode="json") == found["default"]
    after = asked()
    assert (after["method"], after["budget"]) == (best["method"], best["budget"])
    assert best["layer_budgets"] is None
    parameters = [f"--{name.replace('_', '-')}={value}" for name, value in best["parameters"].items()]
    by_hand = asked("--method", best["method"], "--budget", str(best["budget"]), *parameters)
    assert (by_hand["text"], by_hand["kv_fraction"]) == (after["text"], after["kv_fraction"])


def test_a_target_in_percent_is_that_share(place: Path) -> None:
    outcome = run_here("tune", "--target-recall", "70%", "--method", "quest", "--dry-run", "--json", "-q")
    assert json.loads(outcome.stdout)["target"]["value"] == 0.7


def test_rows_are_sorted_and_those_that_hold_nothing_come_last(place: Path) -> None:
    rows = tuned("--dry-run")["methods"]
    assert {row["method"] for row in rows} == {"squeezed", "quest", "window"}
    assert rows[-1]["method"] == "window"
    assert not rows[-1]["holds"]
    holding = [row["kv_fraction"] for row in rows if row["holds"]]
    assert holding == sorted(holding)
    assert all(row["holds"] for row in rows[: len(holding)])
    assert read_manifest(place / "doc.skv").defaults is None


def test_a_table_names_the_cheapest_and_a_note_the_default(place: Path) -> None:
    outcome = run_here(*TUNE)
    assert outcome.code == 0, outcome.stderr
    *rows, before = [line for line in outcome.stdout.splitlines() if "│" in line and "%" in line]
    assert len(rows) == 3
    assert first_method() in before
    assert "10%" in before
    assert "the default before" in before
    assert f"is the default now instead of {first_method()} at 10%" in outcome.stderr
    assert "recall of the oracle's best 5% of at least 0.7" in outcome.stdout
    assert [("cheapest" in row, "does not hold it" in row) for row in rows][::2] == [(True, False), (False, True)]
    assert "; tune --reset removes it" in outcome.stderr
    assert "recall" in run_here("inspect").stdout


def test_the_error_of_the_cheapest_is_compared_with_the_least_error(place: Path) -> None:
    """The default before has centroids for the tokens that it does not select. A target of recall ignores them."""
    run_here("tune", "--target-error", "0.9", "--method", "codes", "-q")
    found = tuned("--dry-run")
    errors = [row["error"] for row in [*found["methods"], found["before"]] if row["holds"] or row is found["before"]]
    assert found["error_ratio"] == found["methods"][0]["error"] / min(errors)
    table = run_here(*TUNE, "--dry-run", "-q").stdout
    assert f"The cheapest setting has {found['error_ratio']:.1f} times the error of" in table
    impossible = run_here("tune", "--target-error", "0.0001", "--method", "quest", "--dry-run", "--json", "-q")
    assert json.loads(impossible.stdout)["error_ratio"] is None


def test_what_a_search_costs_is_told_as_it_starts_and_at_its_end(place: Path) -> None:
    """For every target; an error is searched with a residual too, which makes more forms."""
    forms = []
    for target in ("recall", "error"):
        search = ("tune", f"--target-{target}", "0.5", "--method", "squeezed", "--method", "quest", "--dry-run")
        told = run_here(*search).stderr
        ahead = re.match(
            rf"searching (\d+) variants of 2 methods for {target} .*: some 20 rounds over 3 layers, ", told
        )
        after = re.search(r"\nsearched in (\d+) rounds, \d+ s\n", told)
        assert ahead is not None, told
        assert after is not None, told
        assert int(after[1]) >= 2
        forms.append(int(ahead[1]))
    assert "search" not in run_here(*search, "-q").stderr
    assert forms[1] > forms[0]


def test_what_was_the_default_is_measured_beside_what_is_found(place: Path, setting: Defaults) -> None:
    """By layer too; once a search has made its best the default, that is what the next one measures."""
    found = tuned()
    assert (found["before"]["method"], found["before"]["budget"]) == ("quest", 0.5)
    assert found["before"]["layer_budgets"] == {"0": 0.25, "1": 0.75, "2": 0.5}
    again = tuned()
    assert again["before"] == again["methods"][0]
    outcome = run_here(*TUNE)
    assert "instead of" not in outcome.stderr


def test_the_search_that_is_shown_again_is_among_the_same_methods(place: Path) -> None:
    assert run_here(*TUNE, "-q").code == 0
    told = run_here("build-index", "doc.skv", "--method", "codes", "--model", "model").stderr
    shown = "tune --index doc.skv --target-recall 0.7 --of 0.05 --method squeezed --method quest --method window"
    assert f"`sparsekv {shown}`" in told
    assert run_here(*shown.split(), "-q").code == 0


def test_a_default_is_taken_away_again(place: Path) -> None:
    assert run_here(*TUNE, "-q").code == 0
    assert read_manifest(place / "doc.skv").defaults is not None
    outcome = run_here("tune", "--reset")
    assert (outcome.code, outcome.stderr) == (0, "doc.skv has no default of its own now\n")
    assert read_manifest(place / "doc.skv").defaults is None
    for option in (["--dry-run"], ["--target-recall", "0.9"], ["--method", "quest"], ["--of", "5%"], ["--json"]):
        refused = run_here("tune", "--reset", *option)
        assert refused.code == 2
        assert f"--reset only removes the index's default; leave {option[0]} out" in refused.error()


@pytest.mark.parametrize("options", [("--method", "quest"), ("--budget", "20%"), ("--lookup", "flat"), ("--residual",)])
def test_any_choice_of_ones_own_leaves_the_default_out(
    place: Path, setting: Defaults, options: tuple[str, ...]
) -> None:
    told = asked(*options)
    assert told["method"] == ("quest" if "quest" in options else first_method())
    assert told["budget"] == (0.2 if "20%" in options else 0.1)


def test_a_parameter_of_the_questions_prefill_is_no_choice_for_the_answer(place: Path, setting: Defaults) -> None:
    outcome = run_here(*ASK, "--prefill", "quest", "--page-size", "8")
    assert json.loads(outcome.stdout)["budget"] == setting.budget
    told = "--page-size counts for --prefill quest alone: answers are by the index's default, quest; --method quest"
    assert f"{told} sets it for both\n" in outcome.stderr
    assert "counts for" not in run_here(*ASK, "--prefill", "quest", "--page-size", "8", "--method", "quest").stderr
    assert "counts for" not in run_here(*ASK, "--prefill", "quoka", "--prefill-queries", "8").stderr


def test_budgets_by_layer_and_parameters_reach_the_cache(place: Path, setting: Defaults) -> None:
    """Every layer reads as many tokens as its own budget: on average what half of all in each layer is."""
    told = asked()
    assert (told["method"], told["budget"]) == ("quest", 0.5)
    same = asked("--method", "quest", "--page-size", "2", "--budget", "50%")
    assert told["kv_fraction"] == pytest.approx(same["kv_fraction"], rel=1e-2)
    assert asked("--method", "quest", "--budget", "50%")["kv_fraction"] < 0.75 * same["kv_fraction"]


def test_stats_alone_say_that_it_is_the_default(place: Path, setting: Defaults) -> None:
    assert "default" not in run_here(*ASK).stderr
    assert "the index's default: quest at 50%, keys" in run_here(*ASK, "--stats").stderr
    told = "the index's default: quest at 50%, the first 2 layers dense, keys"
    assert told in run_here(*ASK, "--stats", "--dense-layers", "2").stderr


def test_inspect_shows_the_default(place: Path, setting: Defaults) -> None:
    assert "quest at 50%, on average over layers: recall 0.9000" in run_here("inspect", "-q").stdout
    assert json.loads(run_here("inspect", "-q", "--json").stdout)["defaults"]["method"] == "quest"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"method": "gone"}, "no method 'gone'"),
        ({"parameters": {"pages": 3}}, "has no option pages"),
        ({"parameters": {"page_size": "two"}}, "its page_size is 'two', which is not of type int"),
    ],
    ids=["method", "parameter", "type"],
)
def test_a_default_that_cannot_run_any_more(place: Path, setting: Defaults, change: dict[str, Any], says: str) -> None:
    manifest = read_manifest(place / "doc.skv")
    write_defaults(place / "doc.skv", manifest, setting.model_copy(update=change))
    outcome = run_here(*ASK)
    message = outcome.error()
    assert outcome.code == 1
    for part in (says, "doc.skv", "sparsekv tune", "--method"):
        assert part in message, message
    assert tuned("--dry-run")["before"] is None


def test_the_cheapest_by_time_is_what_takes_least_of_what_holds(place: Path) -> None:
    found = tuned("--cheapest", "time", "--dry-run")
    holding = [one for one in found["methods"] if one["holds"]]
    assert len(holding) > 1
    times = [one["step_ms"] for one in holding]
    assert times == sorted(times)
    assert found["dense_step_ms"] > 0 < times[0]
    assert all(one["step_ms"] is None for one in found["methods"] if not one["holds"])
    assert found["default"]["method"] == holding[0]["method"]
    quest = ("tune", "--target-recall", "0.5", "--method", "quest", "--dry-run", "-q")
    assert "least time of a step" in run_here(*quest, "--cheapest", "time").stdout
    assert "--cheapest time" in run_here(*quest).stdout


def test_recall_is_of_as_many_best_tokens_as_one_says(place: Path) -> None:
    """Recall of fewer best tokens needs a smaller budget. The manifest and `inspect` state the number of best
    tokens."""
    few, many = tuned("--of", "5%"), tuned("--of", "400")
    assert (few["recall_of"], many["recall_of"]) == (0.05, 400)
    budgets = [{row["method"]: row["budget"] for row in found["methods"]} for found in (few, many)]
    middle = read_manifest(place / "doc.skv").split.middle
    for method in ("squeezed", "quest"):
        assert budgets[0][method] < budgets[1][method]
        assert budgets[1][method] * middle >= 0.7 * 400 - 1
    assert few["default"]["target"] == {
        "measure": "recall",
        "value": 0.7,
        "of": 0.05,
        "methods": ["squeezed", "quest", "window"],
    }
    assert "of the oracle's best 400 on the held-out half" in run_here("inspect").stdout


def test_a_perplexity_is_measured_with_the_model(place: Path) -> None:
    few = ("--max-tokens", "600", "--tail", "64", "--method", "squeezed", "--method", "multipole", "-q")
    assert run_here("build-index", "doc.txt", "--model", "model", *few, "--force").code == 0
    options = ("--target-perplexity", "1.5", "--method", "squeezed", "--method", "window", "--model", "model")
    outcome = run_here("tune", *options, "--json", "-q")
    assert outcome.code == 0, outcome.stderr
    found = json.loads(outcome.stdout)
    assert {row["method"] for row in found["methods"]} == {"squeezed", "window"}
    best = found["methods"][0]
    assert best["held_out"] <= 1.5 + found["tolerance"]
    assert best["recall"] is not None
    defaults = read_manifest(place / "doc.skv").defaults
    assert defaults is not None
    assert defaults.target == TuneTarget(measure="perplexity", value=1.5, methods=["squeezed", "window"])
    assert asked()["method"] == best["method"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "give one target"),
        (("--target-recall", "0.9", "--target-error", "0.1"), "give one target"),
        (("--target-recall", "150%"), "--target-recall 1.5: give a share between 0 and 1"),
        (("--target-recall", "high"), "'--target-recall': high is not a share; give one such as 0.9 or 90%"),
        (("--target-recall", "1.5"), "--target-recall 1.5: give a share between 0 and 1"),
        (("--target-error", "0"), "--target-error 0: give a share between 0 and 1"),
        (("--target-perplexity", "0.98"), "--target-perplexity 0.98: give a ratio above 1"),
        (("--target-recall", "0.9", "--of", "120%"), "--of 120% is not a budget: give a share"),
        (("--target-recall", "0.9", "--method", "oracle"), "--method oracle: this is only an upper bound"),
    ],
)
def test_what_is_no_target_is_refused(place: Path, options: tuple[str, ...], says: str) -> None:
    outcome = run_here("tune", *options)
    assert outcome.code == 2
    assert says in outcome.error()


def test_a_target_out_of_reach_leaves_the_index_as_it_is(place: Path) -> None:
    outcome = run_here("tune", "--target-recall", "0.5", "--method", "window", "-q")
    assert outcome.code == 1
    assert "does not hold it" in outcome.stdout
    assert outcome.stderr.splitlines()[-1].startswith(
        "sparsekv: error: no setting that reads less than the whole document"
    )
    assert read_manifest(place / "doc.skv").defaults is None


def test_what_was_found_is_kept_though_nobody_reads_of_it(place: Path) -> None:
    done = shell(" ".join(("sparsekv", *TUNE, "-q", "|", "true")), place)
    assert done.stderr == ""
    assert read_manifest(place / "doc.skv").defaults is not None


def test_what_cannot_be_kept_is_told_all_the_same(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another process took the index's lock while it was searched."""

    def refuse(*_: object) -> None:
        raise ArtifactError("doc.skv is being built by another process; wait for it or stop it")

    monkeypatch.setattr("sparsekv.cli.tune.write_defaults", refuse)
    told = run_here(*TUNE, "-q")
    assert told.code == 1
    assert "best" in told.stdout
    assert "doc.skv is being built by another process" in told.stderr
    assert read_manifest(place / "doc.skv").defaults is None

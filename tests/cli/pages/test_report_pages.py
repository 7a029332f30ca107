"""The pages of reports hold what `--json` prints, and load nothing, whatever a document says."""

import json
import shutil
from pathlib import Path

import pytest
from support.command import fails, run_here
from support.html_page import HOSTILE
from support.report_pages import ASKED, EVAL, REPORT, page_of, printed
from support.tiny_models import tiny_tokenizer

from sparsekv.formats.index.reader import Artifact

COMMANDS = [REPORT, ("inspect", "-q"), (*EVAL, *ASKED)]
ELEMENTS = ["html", "head", "meta", "meta", "meta", "meta", "title", "style", "body", "noscript", "script", "script"]


def test_a_recall_page_has_the_numbers_of_json(place: Path) -> None:
    data, told = page_of(*REPORT).data(), printed(*REPORT, "--by", "layer,head")
    overall = [row for row in told["rows"] if row["layer"] is None]
    assert sorted(map(json.dumps, data["rows"])) == sorted(map(json.dumps, overall))
    assert [row["output_error"] for row in data["rows"]] == sorted(row["output_error"] for row in overall)
    assert {name: data[name] for name in told} | {"rows": told["rows"]} == told
    for row, grids in zip(data["rows"], data["maps"]["rows"], strict=True):
        for name, grid in grids.items():
            for layer, line in zip(data["maps"]["layers"], grid, strict=True):
                for head, value in zip(data["maps"]["heads"], line, strict=True):
                    (own,) = (
                        one[name]
                        for one in told["rows"]
                        if (one["layer"], one["kv_head"], one["method"], one["variant"])
                        == (layer, head, row["method"], row["variant"])
                    )
                    assert value == own


def test_an_inspection_page_has_the_numbers_of_json_and_the_clusters_tokens(place: Path) -> None:
    data = page_of("inspect", "-q").data()
    assert data["inspection"] == printed("inspect", "-q")
    artifact = Artifact(place / "doc.skv")
    assert "".join(data["texts"]) == tiny_tokenizer().decode(artifact.input_ids().tolist())
    assert len(data["texts"]) == len(artifact.input_ids())
    for name, method in data["inspection"]["methods"].items():
        for kind in ("biggest", "most_spread"):
            sizes = [len(positions) for positions in data["positions"][name][kind]]
            assert sizes == [cluster["tokens"] for cluster in method[kind]]
        spreads = [cluster["key_spread"] for cluster in method["most_spread"]]
        assert spreads == sorted(spreads, reverse=True)
        assert spreads[0] >= max(cluster["key_spread"] for cluster in method["biggest"])


def test_an_inspection_page_has_the_facts_of_the_table(place: Path) -> None:
    """Also that its keys and values are those of a sparse prefill, which is a fact of every number on the page."""
    build = ("build-index", "doc.txt", "-o", "sparse.skv", "--model", "model", "--prefill", "quoka", "-q")
    assert run_here(*build, "--max-tokens", "600").code == 0
    facts = page_of("inspect", "--index", "sparse.skv", "-q").data()["facts"]
    assert (facts["prefill"], facts["cut"]) == ("quoka", "after 600 tokens of the document (--max-tokens)")
    rows = [row.split() for row in run_here("inspect", "--index", "sparse.skv").stdout.splitlines()]
    assert all(name.split() in [row[: len(name.split())] for row in rows] for name in facts)


def test_an_evaluation_page_has_the_numbers_of_json(place: Path) -> None:
    data = page_of(*EVAL, *ASKED).data()
    budgets = data.pop("budgets")
    assert data == printed(*EVAL, *ASKED)
    assert len(data["rows"]) == 2
    assert budgets == {
        "rows": ["", "10%"],
        "depths": ["" if one["budget"] is None else "10%" for one in data["depths"]],
    }


@pytest.mark.parametrize("command", [REPORT, (*EVAL, *ASKED)], ids=lambda command: command[0])
def test_a_page_tells_one_token_from_everything(place: Path, command: tuple[str, ...]) -> None:
    """In JavaScript both are the number 1, as JSON has it."""
    shorter = command[: command.index("--budget")] + command[command.index("--budget") + 2 :]
    data = page_of(*shorter, "--budget", "1", "--budget", "100%").data()
    found = dict(zip(data["budgets"]["rows"], data["rows"], strict=True))
    assert {"1", "100%"} <= set(found)
    assert found["1"]["kv_fraction"] < found["100%"]["kv_fraction"]
    if "maps" in data:
        maps = {
            text: grids["recall"] for text, grids in zip(data["budgets"]["rows"], data["maps"]["rows"], strict=True)
        }
        for text, grid in maps.items():
            mean = sum(map(sum, grid)) / sum(map(len, grid))
            assert mean == pytest.approx(found[text]["recall"])


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_pages_are_one_file_that_loads_nothing_and_names_stay_text(place: Path, command: tuple[str, ...]) -> None:
    name = HOSTILE[0].replace("/", "|")
    if command[0] == "eval":
        shutil.copy("doc.txt", name)
        command = tuple(name if part == "doc.txt" else part for part in command)
    else:
        shutil.move("doc.skv", name)
        command = (*command, "-i", name)
    page = page_of(*command)
    assert [one.tag for one in page.elements] == ELEMENTS
    assert page.references() == ["http://"], "the name of SVG's elements alone"
    assert name in page.only("title").text


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_names_that_are_no_page_are_refused_before_anything_is_measured(place: Path, command: tuple[str, ...]) -> None:
    Path("mine.html").write_text("<p>mine")
    fails(2, *command, "--html", "page.png", says=("--html page.png", "give page.html"))
    fails(2, *command, "--html", "page", says=("--html page", "give page.html"))
    fails(2, *command, "--html", "none/page.html", says=("none/page.html", "the folder to write it in does not exist"))
    Path("folder.html").mkdir()
    fails(2, *command, "--html", "folder.html", says=("folder.html is a folder",))
    fails(1, *command, "--html", "mine.html", says=("mine.html exists and is not a page of sparsekv",))
    assert Path("mine.html").read_text() == "<p>mine"


def test_a_page_is_noted_beside_what_is_printed(place: Path) -> None:
    outcome = run_here(*[part for part in REPORT if part != "-q"], "--html", "page.html")
    assert "page: page.html\n" in outcome.stderr
    assert "squeezed" in outcome.stdout

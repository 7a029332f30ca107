"""Indices that come, change and cannot be read while a server runs."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from support.command import run_here
from support.serving import Server, serving, user

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def place(indices: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an index to be named, and a folder of others."""
    folder = tmp_path_factory.mktemp("shelf")
    (folder / "model").symlink_to((indices / "model").resolve())
    shutil.copytree(indices / "doc.skv", folder / "doc.skv")
    shutil.copytree(indices / "raw.skv", folder / "more" / "raw.skv")
    (folder / "more" / "half.skv").mkdir()
    (folder / "more" / "linked.skv").symlink_to((indices / "doc.skv").resolve())
    return folder


@pytest.fixture(scope="module")
def shelf(place: Path) -> Iterator[Server]:
    with serving(place, "doc.skv", "--indices-from", "more", "--model", "model") as one:
        yield one


def prompt_tokens(server: Server, model: str) -> int:
    told = server.openai().chat.completions.create(model=model, messages=[user("What?")], max_tokens=1)  # type: ignore[list-item]
    assert told.usage is not None
    return told.usage.prompt_tokens


def test_an_index_of_the_folder_is_opened_at_its_first_request(shelf: Server, place: Path) -> None:
    listed = {one.id: getattr(one, "sparsekv", None) for one in shelf.openai().models.list()}
    assert listed.keys() == {"doc", "raw"}
    assert listed["raw"] is None
    assert prompt_tokens(shelf, "raw:squeezed@20%") > 0
    assert shelf.openai().models.retrieve("raw").sparsekv["method"] == "squeezed"  # type: ignore[attr-defined]
    shutil.copytree(place / "doc.skv", place / "more" / "later.skv")
    assert prompt_tokens(shelf, "later") == prompt_tokens(shelf, "doc")


@pytest.mark.parametrize("name", ["half", "linked", "../doc", "more/raw", "raw.skv", "/etc/passwd", ".", ""])
def test_only_names_of_indices_are_models(shelf: Server, name: str) -> None:
    with shelf.http() as http:
        answer = http.post(CHAT, json={"model": name, "messages": [user("What?")]})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


def test_an_index_that_is_replaced_is_opened_again(shelf: Server, place: Path) -> None:
    before = prompt_tokens(shelf, "doc")
    body = {"model": "doc@100%", "messages": [user("What?")], "max_tokens": 64, "stream": True}
    (place / "text").write_text("Line 40 says that 40 times 40 is 1600.\n")
    with shelf.http() as http, http.stream("POST", CHAT, json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        more = ("--model", place / "model", "--rebuild", "-q")
        outcome = run_here("append", "--index", place / "doc.skv", place / "text", *more)
        assert outcome.code == 0, outcome.stderr
        after = prompt_tokens(shelf, "doc")
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert after > before + len("Line 40 says that 40 times 40 is 1600.")


def test_an_index_that_cannot_be_read_any_more_is_served_as_it_was(shelf: Server, place: Path) -> None:
    before = prompt_tokens(shelf, "doc")
    manifest = place / "doc.skv" / "manifest.json"
    whole = manifest.read_bytes()
    for content in (b"{", whole[:-500], json.dumps({"schema_version": 1}).encode()):
        replaced = manifest.with_name("manifest.new")
        replaced.write_bytes(content)
        os.replace(replaced, manifest)
        assert prompt_tokens(shelf, "doc") == before
    manifest.unlink()
    assert prompt_tokens(shelf, "doc") == before
    manifest.write_bytes(whole)
    assert prompt_tokens(shelf, "doc") == before


def test_an_index_that_cannot_be_opened_is_told(shelf: Server, place: Path) -> None:
    damaged = place / "more" / "damaged.skv"
    shutil.copytree(place / "more" / "raw.skv", damaged)
    (damaged / "manifest.json").write_text("{}")
    with pytest.raises(openai.InternalServerError) as told:
        prompt_tokens(shelf, "damaged")
    assert "damaged" in told.value.message
    assert str(place) not in told.value.message
    assert prompt_tokens(shelf, "raw") > 0

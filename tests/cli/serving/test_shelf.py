"""Indices that come, change and cannot be read while a server runs."""

import json
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import openai
import pytest
from support.command import fails, run_here
from support.serving import Server, serving, user

from sparsekv.cli.serving import server as serve_command
from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.reader import Artifact
from sparsekv.runtime.attention.config import DecodeConfig

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
    with serving(place, "doc.skv", "--indices-from", "more", "--model", "model", "--prefill", "quest") as one:
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


def test_requests_for_dense_attention_do_not_use_the_prefill_of_the_server(shelf: Server) -> None:
    assert prompt_tokens(shelf, "doc:dense") == prompt_tokens(shelf, "doc")
    asked = {"model": "doc:dense", "messages": [user("What?")], "sparsekv": {"prefill": "quest"}}
    with shelf.http() as http:
        refused = http.post(CHAT, json=asked).json()["error"]
    assert "prefill quest has no effect" in refused["message"]


@pytest.mark.parametrize("name", ["half", "linked", "../doc", "more/raw", "/etc/passwd", ".", ""])
def test_only_names_of_indices_are_models(shelf: Server, name: str) -> None:
    with shelf.http() as http:
        answer = http.post(CHAT, json={"model": name, "messages": [user("What?")]})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"


def test_a_client_opens_and_closes_indices_of_the_folder(shelf: Server, place: Path) -> None:
    shutil.copytree(place / "doc.skv", place / "more" / "guest.skv")
    with shelf.http() as http:

        def opened() -> bool:
            return "sparsekv" in next(one for one in http.get("/v1/models").json()["data"] if one["id"] == "guest")

        assert not opened()
        answer = http.post("/v1/indices", json={"name": "guest"})
        assert answer.status_code == 200
        assert answer.json()["sparsekv"]["tokens"] > 0
        assert opened()
        for _ in range(2):
            assert http.delete("/v1/indices/guest").json() == {"id": "guest", "object": "model", "deleted": True}
            assert not opened()
        assert prompt_tokens(shelf, "guest") == prompt_tokens(shelf, "doc")


@pytest.mark.parametrize(
    ("name", "status", "told"),
    [
        ("../doc", 400, "is a path"),
        ("/etc/passwd", 400, "is a path"),
        ("..", 400, "is a path"),
        ("linked", 404, "no model 'linked'"),
        ("half", 404, "no model"),
        ("raw.skv", 404, "did you mean raw?"),
        ("doc", 403, "doc is named on the server's command line"),
    ],
)
def test_a_client_opens_and_closes_no_others(shelf: Server, name: str, status: int, told: str) -> None:
    with shelf.http() as http:
        answers = [http.post("/v1/indices", json={"name": name})]
        if status != 400:
            answers.append(http.delete(f"/v1/indices/{name}"))
    for answer in answers:
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, "name")
        assert told in answer.json()["error"]["message"]


def test_without_a_folder_of_indices_no_client_opens_or_closes_one(server: Server) -> None:
    with server.http() as http:
        for answer in (http.post("/v1/indices", json={"name": "doc"}), http.delete("/v1/indices/doc")):
            assert answer.status_code == 403
            assert "--indices-from FOLDER" in answer.json()["error"]["message"]


def test_an_index_that_is_replaced_is_opened_again(shelf: Server, place: Path) -> None:
    before = prompt_tokens(shelf, "doc")
    body = {"model": "doc@100%", "messages": [user("What?")], "max_tokens": 64, "stream": True}
    (place / "text").write_text("Line 24 says that 24 times 24 is 576.\n")
    with shelf.http() as http, http.stream("POST", CHAT, json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        more = ("--model", place / "model", "--rebuild", "-q")
        outcome = run_here("append", "--index", place / "doc.skv", place / "text", *more)
        assert outcome.code == 0, outcome.stderr
        after = prompt_tokens(shelf, "doc")
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert after > before + len("Line 24 says that 24 times 24 is 576.")


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


def test_a_folder_of_indices_that_is_gone_is_no_fault_of_the_request(shelf: Server, place: Path) -> None:
    (place / "more").rename(place / "gone")
    try:
        with shelf.http() as http:
            answers = [http.get("/v1/models"), http.delete("/v1/indices/raw")]
    finally:
        (place / "gone").rename(place / "more")
    for answer in answers:
        assert answer.status_code == 500
        assert "--indices-from more cannot be read" in answer.json()["error"]["message"]


def test_notes_that_cannot_be_written_end_no_answer(indices: Path, tmp_path: Path) -> None:
    """The disk of the log is full, and each request has a note: its index cannot be opened again."""
    (tmp_path / "model").symlink_to((indices / "model").resolve())
    shutil.copytree(indices / "doc.skv", tmp_path / "doc.skv")
    manifest = tmp_path / "doc.skv" / "manifest.json"
    with serving(tmp_path, "doc.skv", "--model", "model", stderr="/dev/full") as server:
        before = prompt_tokens(server, "doc")
        for _ in range(2):
            replaced = manifest.with_name("manifest.new")
            replaced.write_text("{")
            os.replace(replaced, manifest)
            assert prompt_tokens(server, "doc") == before


def test_an_index_that_is_served_in_another_dtype_than_its_own_is_named(built: Path, tmp_path: Path) -> None:
    """All indices share the first one's model."""
    other = ("--model", built / "model", "--dtype", "bfloat16", "--method", "squeezed", "-o", tmp_path / "other.skv")
    assert run_here("build-index", built / "doc.txt", *other, "-q").code == 0
    shutil.copytree(built / "doc.skv", tmp_path / "doc.skv")
    idle = ("--method", "window", "--budget", "20%")
    with serving(tmp_path, "doc.skv", "other.skv", *idle, stderr=str(tmp_path / "notes")):
        notes = (tmp_path / "notes").read_text()
    assert "other.skv was built in bfloat16 and is served in float32, as doc.skv is; --dtype" in notes
    assert notes.count("--budget 20% has no effect on window") == 1


def test_indices_beyond_the_memory_are_closed_and_opened_again(indices: Path, place: Path, tmp_path: Path) -> None:
    """With room for none: each index that is opened closes the others, if nobody asks them."""
    (tmp_path / "model").symlink_to((indices / "model").resolve())
    for name in ("doc", "raw"):
        shutil.copytree(indices / f"{name}.skv", tmp_path / "more" / f"{name}.skv")
    with serving(tmp_path, "--indices-from", "more", "--memory", "0", "--model", "model") as server:

        def opened() -> set[str]:
            return {one.id for one in server.openai().models.list() if getattr(one, "sparsekv", None) is not None}

        expected, body = {}, {"messages": [user("What?")], "max_tokens": 8}
        for name in ("doc", "raw"):
            whole = ("--model", tmp_path / "model", "--budget", "100%", "--max-new-tokens", "8", "--json", "-q")
            outcome = run_here("generate", "-i", tmp_path / "more" / f"{name}.skv", "What?", *whole)
            expected[name] = json.loads(outcome.stdout)["text"]
        for name in ("doc", "raw", "doc", "raw"):
            with server.http() as http:
                told = http.post(CHAT, json=body | {"model": f"{name}@100%"}).json()
            assert told["choices"][0]["message"]["content"] == expected[name]
            assert opened() == {name}
        long = body | {"model": "raw@100%", "max_tokens": 300, "stream": True}
        with server.http() as http, http.stream("POST", CHAT, json=long) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert prompt_tokens(server, "doc") > 0
            assert opened() == {"doc", "raw"}  # raw is being asked
            assert [line for line in lines if line][-1] == "data: [DONE]"


def test_an_index_that_is_replaced_under_load_answers_as_the_old_or_the_new(indices: Path, tmp_path: Path) -> None:
    """Each answer is that of `generate` over one of the states, and after a change none is of the state before."""
    (tmp_path / "model").symlink_to((indices / "model").resolve())
    shutil.copytree(indices / "doc.skv", tmp_path / "doc.skv")
    whole = ("--model", tmp_path / "model", "--budget", "100%", "--max-new-tokens", "8", "--json", "-q")
    ended, found = threading.Event(), list[tuple[int, str]]()

    def expected() -> tuple[int, str]:
        outcome = run_here("generate", "-i", tmp_path / "doc.skv", "What?", *whole)
        told = json.loads(outcome.stdout)
        return told["prompt_tokens"], told["text"]

    with serving(tmp_path, "doc.skv", "--model", "model") as server:

        def ask(http: httpx2.Client) -> tuple[int, str]:
            body = {"model": "doc@100%", "messages": [user("What?")], "max_tokens": 8}
            answer = http.post(CHAT, json=body)
            assert answer.status_code == 200, answer.text
            told = answer.json()
            return told["usage"]["prompt_tokens"], told["choices"][0]["message"]["content"]

        def keep_asking() -> None:
            with server.http() as http:
                while not ended.is_set():
                    found.append(ask(http))

        with ThreadPoolExecutor(4) as clients:
            asking, states = [clients.submit(keep_asking) for _ in range(4)], [expected()]
            try:
                for number in (40, 41):
                    (tmp_path / "text").write_text(f"Line {number} says that {number} is a number.\n")
                    more = ("--model", tmp_path / "model", "--rebuild", "-q")
                    outcome = run_here("append", "--index", tmp_path / "doc.skv", tmp_path / "text", *more)
                    assert outcome.code == 0, outcome.stderr
                    states.append(expected())
                    with server.http() as http:
                        assert ask(http) == states[-1]
            finally:
                ended.set()
            for one in asking:
                one.result()
    assert set(found) == set(states)


def test_steps_of_many_answers_are_dense_where_that_was_measured_to_be_faster(
    indices: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rule holds for indices that are open at the start, and for one that is opened later."""
    for name in ("doc", "raw"):
        shutil.copytree(indices / f"{name}.skv", tmp_path / "more" / f"{name}.skv")
    (tmp_path / "more" / "model").symlink_to((indices / "model").resolve())
    monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path / "cache"))
    options = ("more/doc.skv", "--indices-from", "more", "--model", "more/model", "--method", "auto", "--slots", "2")
    with serving(tmp_path, *options, stderr=str(tmp_path / "notes")) as server:
        assert "doc.skv: --method auto: " in (tmp_path / "notes").read_text()
        assert "(2 questions: " in (tmp_path / "notes").read_text()
        for name in ("doc", "raw"):
            answer = server.openai().completions.create(model=name, prompt="Why?", max_tokens=3)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 3
        assert "raw.skv: --method auto: " in (tmp_path / "notes").read_text()


def test_every_index_is_timed_in_the_dtype_in_which_it_is_served(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = ("--model", built / "model", "--dtype", "bfloat16", "--method", "squeezed", "-o", tmp_path / "other.skv")
    assert run_here("build-index", built / "doc.txt", *other, "-q").code == 0
    timed = list[tuple[str, str]]()

    def take(artifact: Artifact, config: DecodeConfig, slots: int, device: str, dtype: str, **_: object) -> None:
        timed.append((artifact.folder.name, dtype))
        if len(timed) == 2:
            raise UsageError("both are timed")

    monkeypatch.setattr(serve_command, "take_faster_for_numbers", take)
    indices, model = (built / "doc.skv", tmp_path / "other.skv"), ("--model", built / "model")
    for dtype, expected in (("auto", "float32"), ("bfloat16", "bfloat16")):
        timed.clear()
        assert run_here("serve", *indices, *model, "--method", "auto", "--dtype", dtype).code == 2
        assert timed == [("doc.skv", expected), ("other.skv", expected)]


@pytest.mark.parametrize("option", [("--placement", "host"), ("--prefill", "quoka")])
def test_auto_needs_rows_on_the_device_and_no_method_for_questions(place: Path, option: tuple[str, str]) -> None:
    says = (option[0], "cannot be combined with --method auto")
    fails(2, "serve", str(place / "doc.skv"), "--method", "auto", *option, says=says)

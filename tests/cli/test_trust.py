"""Nothing is loaded because an index names it: the embedded model, and what a person has named, alone."""

import json
import shutil
from pathlib import Path

import pytest
from support.command import run_here

from sparsekv.formats.index.manifest import manifest_bytes, read_manifest
from sparsekv.formats.models.find import EMBEDDED

NAMED = "named_models.json"
COMMANDS = [
    ("generate", "Why?"),
    ("append", "doc.txt", "--rebuild"),
    ("recall-report", "--queries", "doc.txt"),
    ("tune", "--target-perplexity", "1.1"),
]


def _naming(place: Path, name: str) -> None:
    """Let the index name another model, as its maker may."""
    manifest = read_manifest(place / "doc.skv")
    renamed = manifest.model_copy(update={"model": manifest.model.model_copy(update={"id": name})})
    (place / "doc.skv" / "manifest.json").write_bytes(manifest_bytes(renamed)[0])


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache: no model is in it, and none was named."""
    monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_model_that_an_index_names_is_not_loaded(place: Path, command: tuple[str, ...]) -> None:
    _naming(place, "someone/tiny; rm x")
    outcome = run_here(*command)
    assert outcome.error() == (
        "the index was built with someone/tiny; rm x, which you have not yet given with --model; if you trust it, add "
        "--model 'someone/tiny; rm x'"
    )
    assert outcome.code == 1


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_folder_that_is_gone_is_asked_for(place: Path, command: tuple[str, ...]) -> None:
    _naming(place, "/nowhere/at/all")
    outcome = run_here(*command)
    assert outcome.error() == (
        "the index was built with /nowhere/at/all, and this folder does not exist here; name the model's folder with "
        "--model PATH"
    )
    assert outcome.code == 1


def test_a_model_that_was_named_is_loaded_and_said_so(place: Path, own_cache: Path) -> None:
    model = str((place / "model").resolve())
    assert "add --model" in run_here("generate", "Why?", "-q").error()
    assert run_here("generate", "Why?", "--model", "model", "--max-new-tokens", "1", "-q").code == 0
    assert json.loads((own_cache / NAMED).read_text()) == [model]
    shutil.copytree(model, "other")
    assert run_here("generate", "Why?", "--model", "other", "--max-new-tokens", "1", "-q").code == 0
    assert json.loads((own_cache / NAMED).read_text()) == sorted([model, str(place.resolve() / "other")])
    told = run_here("generate", "Why?", "--max-new-tokens", "1")
    cut = "the answer was cut after 1 token (--max-new-tokens)\n"
    assert told.stderr == f"loading {model}, which the index names and you have named before\n{cut}"
    assert [path.name for path in own_cache.iterdir()] == [NAMED]


@pytest.mark.parametrize("kept", ["", "nonsense", "{}", '{"names": 1}', "[1]", "[" * 200_000, b"\xff", None])
def test_what_was_named_may_be_damaged_or_not_written(place: Path, own_cache: Path, kept: str | bytes | None) -> None:
    own_cache.mkdir()
    if kept is None:
        (own_cache / NAMED).mkdir()
    else:
        (own_cache / NAMED).write_bytes(kept if isinstance(kept, bytes) else kept.encode())
    assert "add --model" in run_here("generate", "Why?", "-q").error()
    outcome = run_here("generate", "Why?", "--model", "model", "--max-new-tokens", "1", "-q")
    assert (outcome.code, outcome.stderr) == (0, "")
    assert [path.name for path in own_cache.iterdir()] == [NAMED]


def test_a_cache_that_is_none_keeps_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEKV_CACHE", "/dev/null/cache")
    outcome = run_here("generate", "Why?", "--model", "model", "--max-new-tokens", "1", "-q")
    assert (outcome.code, outcome.stderr) == (0, "")


def test_what_lies_here_under_a_hub_models_name_is_not_what_was_named(place: Path, own_cache: Path) -> None:
    own_cache.mkdir()
    (own_cache / NAMED).write_text('["someone/tiny"]')
    _naming(place, "someone/tiny")
    (place / "someone").mkdir()
    shutil.copytree(place / "model", place / "someone" / "tiny")
    assert "add --model someone/tiny" in run_here("generate", "Why?", "-q").error()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "someone/tiny",
            "which you have not yet given with --model; if you trust it, add --model someone/tiny",
        ),
        ("/nowhere/at/all", "this folder does not exist here; name the model's folder with --model PATH"),
        (EMBEDDED, f"{EMBEDDED} is not in the cache; fetch it with `sparsekv models pull`"),
    ],
)
def test_inspect_goes_on_without_words_and_loads_nothing(place: Path, own_cache: Path, name: str, says: str) -> None:
    _naming(place, name)
    outcome = run_here("inspect", "--json")
    assert outcome.code == 0, outcome.stderr
    assert outcome.stderr.startswith("no words, only counts: ")
    assert outcome.stderr.endswith(f"{says}\n")
    biggest = json.loads(outcome.stdout)["methods"]["squeezed"]["biggest"]
    assert biggest
    assert not any(cluster["words"] for cluster in biggest)
    assert not own_cache.exists()


def test_inspect_has_words_of_a_model_that_is_named_without_its_weights(place: Path, own_cache: Path) -> None:
    shutil.copytree(place / "model", place / "other")
    (place / "other" / "model.safetensors").unlink()
    outcome = run_here("inspect", "--json", "--model", "other")
    assert all(cluster["words"] for cluster in json.loads(outcome.stdout)["methods"]["squeezed"]["biggest"])
    absent = run_here("inspect", "--json", "--model", "someone/absent")
    assert "is not on this machine; fetch it with `sparsekv models pull someone/absent`" in absent.stderr


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "--model is empty"),
        ("~nouser", "model '~nouser': this machine has no such user"),
        ("~nouser/model", "model '~nouser/model': this machine has no such user"),
        ("a" * 300, f"model '{'a' * 300}' is "),
    ],
    ids=["empty", "nobody", "nobody's model", "long"],
)
@pytest.mark.parametrize(
    "command",
    [("build-index", "doc.txt", "-o", "new.skv"), ("generate", "Why?"), ("eval", "doc.txt")],
    ids=lambda one: one[0],
)
def test_a_name_of_nothing_is_wrong_usage(place: Path, command: tuple[str, ...], name: str, says: str) -> None:
    outcome = run_here(*command, "--model", name)
    assert says in outcome.error()
    assert outcome.code == 2

"""`append` and `generate --save-to` as a person uses them, and everything that can be done wrong with them."""

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.command import run_here
from support.configs import sparse
from support.tiny_models import POSITIONS, tiny_tokenizer

from sparsekv.formats.index.manifest import manifest_bytes, read_manifest
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.writer import ArtifactWriter
from sparsekv.formats.models.load import identify, load_model
from sparsekv.runtime.decoding.answer import Sampling, question_ids
from sparsekv.runtime.decoding.engine import generate
from sparsekv.runtime.decoding.open import OpenIndex, open_index
from sparsekv.runtime.methods.multipole import Multipole
from sparsekv.runtime.selection.interface import Budget

MORE = "One more line, which the index has to take in.\n"
TOKENS = 12


@pytest.fixture(scope="module")
def of_multipole(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of multipole alone, to be copied, never changed."""
    folder = tmp_path_factory.mktemp("online")
    shutil.copy(built / "doc.txt", folder)
    (folder / "model").symlink_to(built / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = run_here("build-index", "doc.txt", "--model", "model", "--method", "multipole", "--block", "256", "-q")
    assert done.code == 0, done.stderr
    return folder / "doc.skv"


@pytest.fixture
def online(of_multipole: Path, place: Path) -> Path:
    """`place` with an index of multipole alone, and `more.txt`."""
    shutil.rmtree("doc.skv")
    shutil.copytree(of_multipole, "doc.skv")
    (place / "more.txt").write_text(MORE)
    return place


def _refused(code: int, says: tuple[str, ...], *command: str | Path) -> None:
    """Fail unless a command ends with one line that says all this, and leaves every file as it is."""
    files = {path: path.stat().st_mtime_ns for path in Path().rglob("*") if path.is_file() and path.name != ".lock"}
    outcome = run_here(*command)
    message = outcome.error()
    assert (outcome.code, [part for part in says if part not in message]) == (code, []), message
    assert files == {
        path: path.stat().st_mtime_ns for path in Path().rglob("*") if path.is_file() and path.name != ".lock"
    }


def test_a_file_and_standard_input_are_taken_in(online: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Artifact(Path("doc.skv")).input_ids()
    first = run_here("append", "more.txt", "-q")
    assert (first.code, first.stdout, first.stderr) == (0, "doc.skv\n", "")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"From a pipe.")))
    second = run_here("append", "--index", "doc.skv", "-")
    assert (second.code, second.stdout) == (0, "doc.skv\n")
    assert "adding 14 tokens" in second.stderr
    ids = Artifact(Path("doc.skv")).input_ids()
    assert torch.equal(ids[: len(before)], before)
    assert tiny_tokenizer().decode(ids[len(before) :]) == f"\n\n{MORE}\n\nFrom a pipe."
    verified = run_here("inspect", "--verify", "--json", "-q")
    assert json.loads(verified.stdout)["verified"] is True


def test_it_is_told_that_codes_learn_again(place: Path) -> None:
    shutil.rmtree("doc.skv")
    assert run_here("build-index", "doc.txt", "--model", "model", "-q").code == 0
    (place / "more.txt").write_text(MORE)
    anew = "codes: built anew from all tokens, as the text has now "
    assert anew not in run_here("append", "more.txt").stderr
    (place / "long.txt").write_text((place / "doc.txt").read_text()[:800])
    assert anew in run_here("append", "long.txt").stderr


def test_a_method_that_takes_no_tokens_stops_the_command_unless_it_may_be_built_again(place: Path) -> None:
    (place / "more.txt").write_text(MORE)
    _refused(2, ("squeezed of doc.skv", "--rebuild"), "append", "more.txt")
    done = run_here("append", "more.txt", "--rebuild", "-q")
    assert (done.code, done.stdout) == (0, "doc.skv\n"), done.stderr
    manifest = Artifact(place / "doc.skv").manifest
    assert {"squeezed", "multipole"} <= manifest.methods.keys()
    for method in ("squeezed", "multipole"):
        orders = manifest.files[f"{method}/layer_000.safetensors"].tensors["token_order"].shape
        assert orders[1] == manifest.split.middle
    assert run_here("inspect", "--verify", "-q").code == 0


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        (("append", "none.txt"), 2, ("no such file", "none.txt")),
        (("append", "model"), 2, ("model is a folder",)),
        (("append", "empty.txt"), 2, ("empty.txt is empty",)),
        (("append", "long.txt"), 2, (f"{POSITIONS:,} positions", "append less", "--rope-scaling")),
        (("append", "more.txt", "--index", "none.skv"), 2, ("none.skv", "build-index")),
        (("append", "more.txt", "--chunk-size", "0"), 2, ("--chunk-size 0",)),
        (("append", "more.txt", "--device", "tpu"), 2, ("--device tpu", "cpu")),
        (("append", "more.txt", "--dtype", "bfloat16"), 2, ("--dtype bfloat16", "float32")),
        (("append", "more.txt", "--model", "none"), 2, ("none", "models list")),
        (("append",), 2, ("MORE",)),
        (("generate", "--batch-file", "more.txt", "--save-to", "talk.skv"), 2, ("--save-to", "--batch-file")),
        (("generate", "Why?", "--save-to", "doc.skv"), 2, ("--save-to doc.skv: that name exists already",)),
        (("generate", "Why?", "--save-to", "dangling.skv"), 2, ("--save-to dangling.skv: that name exists already",)),
        (("generate", "Why?", "--save-to", "none/talk.skv"), 2, ("none/talk.skv", "folder")),
        (("generate", "Why?", "--save-to", "talk.skv", "--dtype", "float16"), 2, ("--dtype float16", "float32")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_usage(online: Path, command: tuple[str, ...], code: int, says: tuple[str, ...]) -> None:
    (online / "empty.txt").write_text(" \n")
    (online / "dangling.skv").symlink_to("nowhere")
    (online / "long.txt").write_text("x" * POSITIONS)
    quiet = ("-q",) if command[-1] == "long.txt" else ()
    _refused(code, says, *command, *quiet)


def _flip_a_byte(folder: Path) -> None:
    data = bytearray((folder / "queries" / "layer_000.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "queries" / "layer_000.safetensors").write_bytes(data)


def _other_revision(folder: Path) -> None:
    manifest = read_manifest(folder)
    record = manifest.methods["multipole"].model_copy(update={"revision": 99})
    changed = manifest.model_copy(update={"methods": {"multipole": record}})
    (folder / "manifest.json").write_bytes(manifest_bytes(changed)[0])


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_flip_a_byte, ("queries/layer_000.safetensors", "sha256", "writes anew what is missing or damaged")),
        (_other_revision, ("method multipole", "another version", "--force")),
    ],
)
def test_damage_and_other_versions(online: Path, damage: Callable[[Path], None], says: tuple[str, ...]) -> None:
    damage(online / "doc.skv")
    _refused(1, says, "append", "more.txt", "-q")


def test_another_build_holds_the_folder(online: Path) -> None:
    with ArtifactWriter(Path("doc.skv")):
        _refused(1, ("doc.skv", "another process"), "append", "more.txt", "-q")


def _ask(index: OpenIndex, ids: torch.Tensor) -> list[int]:
    """Tokens of the answer to question ids [Q] with everything attended."""
    cache = index.cache(sparse("multipole", Multipole(), Budget(1.0)))
    return generate(index, cache, ids, Sampling(max_new_tokens=TOKENS)).ids


def test_a_saved_conversation_goes_on_as_if_all_of_it_had_been_asked_at_once(online: Path) -> None:
    options = ("--budget", "100%", "--max-new-tokens", str(TOKENS))
    answered = run_here("generate", "Why?", *options, "--save-to", "talk.skv", "--json")
    assert answered.code == 0, answered.stderr
    assert "ids" not in json.loads(answered.stdout)
    assert sorted(path.name for path in online.glob("*.skv*")) == ["doc.skv", "talk.skv"]
    assert run_here("inspect", "-i", "talk.skv", "--verify", "-q").code == 0
    loaded = load_model("model", device="cpu")
    document, talk = (
        open_index(Artifact(online / name), loaded.model, loaded.tokenizer, identify(loaded))
        for name in ("doc.skv", "talk.skv")
    )
    first = question_ids(document, "Why?")
    said = torch.cat([first, torch.tensor(_ask(document, first))])
    assert torch.equal(talk.input_ids, torch.cat([document.input_ids, said]))
    assert talk.artifact.manifest.parent_uuid == document.artifact.manifest.uuid
    second = question_ids(talk, "And then?")
    assert str(talk.tokenizer.decode(second)).startswith("<|end|>\n<|start|>user\nAnd then?")
    at_once = _ask(document, torch.cat([said, second]))
    assert _ask(talk, second) == at_once
    went_on = run_here("generate", "And then?", "-i", "talk.skv", *options)
    assert went_on.stdout == f"{talk.tokenizer.decode(at_once, skip_special_tokens=True)}\n"


def test_methods_that_take_no_tokens_are_built_again_for_a_conversation(place: Path) -> None:
    done = run_here("generate", "Why?", "--max-new-tokens", "4", "--save-to", "talk.skv", "--raw", "-q")
    assert done.code == 0, done.stderr
    document, talk = Artifact(place / "doc.skv").manifest, Artifact(place / "talk.skv").manifest
    assert talk.methods.keys() == document.methods.keys()
    assert talk.split.middle == document.split.middle + len("Why?") + 4
    assert talk.prompt.chat == document.prompt.chat
    again = run_here("generate", "And then?", "-i", "talk.skv", "--method", "squeezed", "--max-new-tokens", "4", "-q")
    assert again.code == 0, again.stderr


def test_a_text_that_was_added_is_not_added_again_unless_it_is_wanted(online: Path) -> None:
    first = run_here("append", "more.txt")
    assert first.code == 0, first.stderr
    manifest = Artifact(Path("doc.skv")).manifest
    added = manifest.additions[0]
    assert f"added sha256 {added.sha256[:12]}, {added.tokens} tokens" in first.stderr
    repeated = run_here("append", "more.txt")
    assert (repeated.code, repeated.stdout) == (0, "doc.skv\n")
    assert f"holds this text already (sha256 {added.sha256[:12]}" in repeated.stderr
    assert "--again" in repeated.stderr
    assert Artifact(Path("doc.skv")).manifest == manifest
    read_otherwise = run_here("append", "more.txt", "--special-tokens")
    assert "holds this text already" in read_otherwise.stderr
    assert run_here("append", "more.txt", "--again", "-q").code == 0
    ids = Artifact(Path("doc.skv")).input_ids()
    assert str(tiny_tokenizer().decode(ids)).endswith(f"\n\n{MORE}\n\n{MORE}")
    assert Artifact(Path("doc.skv")).manifest.additions == [added, added]


@pytest.mark.parametrize("meant", [False, True])
def test_a_text_whose_special_tokens_were_read_otherwise_is_not_there_already(online: Path, meant: bool) -> None:
    Path("more.txt").write_text("A turn.<|end|>")
    first, other = ((), ("--special-tokens",))[:: -1 if meant else 1]
    assert run_here("append", "more.txt", *first, "-q").code == 0
    assert Artifact(Path("doc.skv")).manifest.additions[0].special_tokens is meant
    assert "holds this text already" in run_here("append", "more.txt", *first).stderr
    read = "with their meaning; give" if meant else "as plain text; leave out"
    _refused(2, (f"special tokens read {read} --special-tokens", "--again"), "append", "more.txt", *other)


def test_a_build_of_the_document_alone_does_not_lose_what_was_appended(online: Path) -> None:
    assert run_here("append", "more.txt", "-q").code == 0
    build = ("build-index", "doc.txt", "--model", "model", "--method", "multipole", "--block", "256", "-q")
    _refused(1, ("doc.skv holds", "appended tokens", "--output", "--force"), *build)
    assert run_here(*build, "--force").code == 0
    assert Artifact(Path("doc.skv")).manifest.additions == []


def test_a_full_disk_names_no_option_that_the_command_lacks(online: Path) -> None:
    free = shutil.disk_usage(online)._replace(free=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: free)
        outcome = run_here("append", "more.txt", "-q")
    assert outcome.code == 1
    assert "make room, or add less" in outcome.error()
    assert "--output" not in outcome.stderr


def test_a_default_that_no_longer_holds_is_told_of(online: Path) -> None:
    tuned = run_here("tune", "--target-recall", "0.5", "--method", "multipole", "-q")
    assert tuned.code == 0, tuned.stderr
    saved = run_here("generate", "Why?", "--max-new-tokens", "2", "--save-to", "talk.skv").stderr
    shutil.rmtree("talk.skv")
    assert "for the old index is not saved in the new one; find one with `sparsekv tune --index talk.skv --ta" in saved
    told = run_here("append", "more.txt").stderr
    assert "is no longer used; find a new one with `sparsekv tune --index doc.skv --target-" in told


def test_a_text_in_another_encoding_is_the_same_text(online: Path) -> None:
    """Built and appended: the index of the text in UTF-8 is that of the text in UTF-16."""
    more = "Ünd a lïne more, which has létters of Latin-1.\n"
    build = ("build-index", "--model", "model", "--method", "multipole", "--block", "256", "-q")
    (online / "plain.txt").write_text(more * 12)
    (online / "wide.txt").write_text(more * 12, encoding="utf-16")
    assert run_here(*build, "plain.txt").code == 0
    assert run_here(*build, "wide.txt").code == 0, "its byte order mark names its encoding"
    plain, wide = (read_manifest(online / name).prompt for name in ("plain.skv", "wide.skv"))
    assert plain == wide
    (online / "latin.txt").write_text(more, encoding="latin-1")
    _refused(2, ("latin.txt is not text in UTF-8", "--encoding latin-1"), "append", "-i", "plain.skv", "latin.txt")
    assert run_here("append", "-i", "plain.skv", "latin.txt", "--encoding", "latin-1", "-q").code == 0
    assert str(tiny_tokenizer().decode(Artifact(online / "plain.skv").input_ids())).endswith(more)
    _refused(2, ("--encoding none: there is no such text encoding",), *build, "plain.txt", "--encoding", "none")


def test_text_that_is_appended_to_a_saved_talk_is_a_message(online: Path) -> None:
    saved = run_here("generate", "Why?", "--max-new-tokens", "4", "--save-to", "talk.skv", "-q")
    assert saved.code == 0, saved.stderr
    before = Artifact(online / "talk.skv")
    assert run_here("append", "-i", "talk.skv", "more.txt", "-q").code == 0
    after = Artifact(online / "talk.skv")
    added = str(tiny_tokenizer().decode(after.input_ids()[len(before.input_ids()) :]))
    assert added == f"<|end|>\n<|start|>user\n{MORE}"
    assert after.manifest.prompt.chat == Artifact(online / "doc.skv").manifest.prompt.chat

"""Every command on an index of a model whose layers do not all attend, as a person gives them."""

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.causal_families import tiny_config, tiny_model
from support.command import fails, run_here
from support.reference import assert_close
from support.sealing import change_tensors
from support.tiny_models import tiny_tokenizer

from sparsekv.formats.index.manifest import read_manifest
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.index.schema import state_file
from sparsekv.formats.models.load import load_model

QUESTION = "What is 7 times 7?"
SHORT = ("--max-new-tokens", "8", "-q")
EVERYTHING = ("--budget", "100%", *SHORT)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, built: Path) -> Path:
    """`model/`, `doc.txt` and `doc.skv`, with a checkpoint each block, to be copied, never changed."""
    folder = tmp_path_factory.mktemp("states")
    tiny_model(tiny_config("qwen3_next", num_hidden_layers=4)).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    shutil.copy(built / "doc.txt", folder)
    built_from = ("build-index", folder / "doc.txt", "--model", folder / "model", "--method", "codes")
    done = run_here(*built_from, "--checkpoints", "1", "-q")
    assert done.code == 0, done.stderr
    return folder


@pytest.fixture
def home(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made / "doc.skv", tmp_path / "doc.skv")
    shutil.copy(made / "doc.txt", tmp_path)
    (tmp_path / "model").symlink_to(made / "model")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _stdout(*command: str | Path) -> str:
    done = run_here(*command)
    assert done.code == 0, done.stderr
    return str(done.stdout)


def _plain(folder: Path, after: torch.Tensor, tokens: int = 8) -> list[int]:
    """The plain model's greedy tokens after those of an index and these."""
    model, said = load_model("model").model, torch.cat([Artifact(folder).input_ids(), after])[None]
    before = said.shape[1]
    with torch.inference_mode():
        for _ in range(tokens):
            said = torch.cat([said, model(input_ids=said, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return said[0, before:].tolist()


@pytest.mark.usefixtures("home")
def test_answers_saved_resumed_and_appended_to_are_the_plain_models() -> None:
    index = Path("doc.skv")
    told = json.loads(_stdout("generate", "--index", index, QUESTION, *EVERYTHING, "--json", "--save-to", "saved.skv"))
    dense = json.loads(_stdout("generate", "--index", index, QUESTION, *SHORT, "--method", "dense", "--json"))
    assert told["text"] == dense["text"]
    saved, first = Artifact(Path("saved.skv")), Artifact(index)
    said, asked = saved.input_ids()[len(first.input_ids()) :], told["prompt_tokens"] - len(first.input_ids())
    answer = said[asked:].tolist()
    assert answer
    assert _plain(index, said[:asked])[: len(answer)] == answer
    Path("more.txt").write_text("One more line.\n")
    _stdout("append", "--index", "saved.skv", "more.txt", "-q")
    Path("questions.txt").write_text(f"{QUESTION}\nWhy?\nWhat is 3 times 3, and what is 4 times 4?\n")
    batch = ("generate", "--index", "saved.skv", "--batch-file", "questions.txt", *EVERYTHING, "--json")
    together, alone = (_stdout(*batch, "--batch-size", size).splitlines() for size in ("3", "1"))
    texts = [[json.loads(line)["text"] for line in lines] for lines in (together, alone)]
    assert texts[0] == texts[1]
    _stdout(*batch, "--resume", "answers.jsonl")
    assert [json.loads(line)["text"] for line in _stdout(*batch, "--resume", "answers.jsonl").splitlines()] == texts[0]


@pytest.mark.usefixtures("home")
def test_a_chat_its_saved_index_and_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{QUESTION}\nWhy?\n".encode())))
    assert _stdout("chat", "--index", "doc.skv", *EVERYTHING)
    report = json.loads(_stdout("recall-report", "--index", "doc.skv", "--by", "layer", "--json", "-q"))
    assert {row["layer"] for row in report["rows"]} - {None} == {3}
    told = json.loads(_stdout("inspect", "--index", "doc.skv", "--json", "--verify", "-q"))
    manifest = read_manifest(Path("doc.skv"))
    assert told["states"] == manifest.states
    assert told["bytes"]["states"] == sum(
        record.bytes for name, record in manifest.files.items() if name.startswith("states/")
    )
    assert {256, 512, 768} <= {*manifest.states}
    shown = ", ".join(map(str, manifest.states))
    assert f"after each of {shown} tokens" in _stdout("inspect", "--index", "doc.skv")
    _stdout("convert", "doc.skv", "--kv-dtype", "int8", "-o", "small.skv", "-q")
    assert read_manifest(Path("small.skv")).states == manifest.states
    _stdout("trace", "--index", "doc.skv", QUESTION, "-o", "trace.json", *SHORT)


@pytest.mark.usefixtures("home")
def test_what_no_state_can_follow_is_refused_in_a_line() -> None:
    trace = ("trace", "--index", "doc.skv", QUESTION, "--without", "Line 1 says", "-q")
    fails(2, *trace, says=("from which a passage cannot be removed",))
    tune = ("tune", "--index", "doc.skv", "--target-perplexity", "1.1", "-q")
    fails(2, *tune, says=("stores no state from which the beginning of its tail",))
    build = ("build-index", "doc.txt", "--model", "model", "-q")
    fails(2, *build, "--prefill", "quoka", "-o", "other.skv", says=("has layers with a state",))
    assert not Path("other.skv").exists()
    fails(2, "build-index", "doc.skv", "--method", "multipole", "--checkpoints", "2", says=("leave the option out",))


Change = Callable[[torch.Tensor], torch.Tensor]
WRONG: dict[str, Change] = {
    "zeros": torch.zeros_like,
    "half as much": lambda tensor: tensor / 2,
    "another's": lambda tensor: tensor.flatten().flip(0).view_as(tensor),
    "not numbers": lambda tensor: torch.full_like(tensor, torch.nan),
}


@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_state_whose_sums_are_right_is_told_before_an_answer_or_an_append(home: Path, how: str) -> None:
    """After all tokens, from which answers begin; before the old tail, and at a checkpoint, where builds go on."""
    change, split = WRONG[how], read_manifest(home / "doc.skv").split
    more, text = Path("more.txt"), Path("doc.txt").read_text()
    more.write_text("One more line.\n")
    edited = text[:700] + "other" + text[700:]
    append, build = (
        ("append", "-i", "doc.skv", more),
        ("build-index", "doc.txt", "--model", "model", "--method", "codes"),
    )
    ask = ("generate", "--index", "doc.skv", QUESTION)
    for tokens, command, document in (
        (split.tokens, ask, text),
        (split.sinks + split.middle, append, text),
        (512, build, edited),
    ):
        shutil.copytree("doc.skv", "kept.skv")
        before = read_manifest(home / "doc.skv").uuid
        Path("doc.txt").write_text(document)
        change_tensors(
            home / "doc.skv", state_file(tokens), lambda tensors: {name: change(one) for name, one in tensors.items()}
        )
        done = run_here(*command, "-q")
        assert done.code == 1, (how, tokens)
        (line,) = done.stderr.splitlines()
        assert (
            f"state after {tokens:,} tokens" in line
            or "states/token" in line
            or "stores for the end of the document" in line
        )
        assert read_manifest(home / "doc.skv").uuid == before
        shutil.rmtree("doc.skv")
        Path("kept.skv").rename("doc.skv")


def test_a_damaged_missing_or_strange_state_is_told(home: Path) -> None:
    manifest = read_manifest(home / "doc.skv")
    name = max(name for name in manifest.files if name.startswith("states/"))
    path = home / "doc.skv" / manifest.files[name].path
    whole, state = path.read_bytes(), Artifact(home / "doc.skv").state(manifest.split.tokens)
    state = {name: tensor.clone() for name, tensor in state.items()}
    path.write_bytes(whole[:-4] + bytes(byte ^ 1 for byte in whole[-4:]))
    fails(1, "generate", "--index", "doc.skv", QUESTION, "-q", says=(f"{name} of doc.skv is damaged",))
    path.unlink()
    fails(1, "generate", "--index", "doc.skv", QUESTION, "-q", says=(f"{name} of doc.skv is missing",))
    done = run_here("build-index", "doc.txt", "--model", "model", "--method", "codes", "-q")
    assert done.code == 0, done.stderr
    for tensor, again in Artifact(home / "doc.skv").state(manifest.split.tokens).items():
        assert_close(again, state[tensor], 1e-4)

"""Everything a person can do wrong: one line that names the thing and the remedy, the right code, no traceback."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.command import fails, run_here
from support.tiny_models import FAMILIES, POSITIONS, save_tiny, tiny_tokenizer

from sparsekv.formats.index.identity import SAMPLES_PER_TENSOR
from sparsekv.formats.index.manifest import manifest_bytes, read_manifest

BUILD = ("build-index", "doc.txt", "--model", "model")


@pytest.mark.parametrize(
    ("content", "code", "says"),
    [
        (b"", 2, ("doc.txt is empty", "give a document")),
        (b" \n\t\n", 2, ("doc.txt is empty",)),
        (b"\x89PNG\r\n\x1a\n\x00\xff", 2, ("doc.txt is not text", "convert")),
        (b"abc\0def", 2, ("doc.txt is not text", "zero bytes")),
        (b"A short one.", 2, ("too short", "138", "--tail")),
    ],
)
def test_documents(place: Path, content: bytes, code: int, says: tuple[str, ...]) -> None:
    (place / "doc.txt").write_bytes(content)
    fails(code, *BUILD, "-o", "new.skv", says=says)
    assert not (place / "new.skv").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("build-index", "none.txt"), 2, ("no such file", "none.txt")),
        *((("inspect", "--index", path), 2, (f"{path or '.'} is a folder, but no index",)) for path in (".", "", "/")),
        (("recall-report", "--html", "."), 2, ("--html . is a folder",)),
        (("eval", "doc.txt", "--answers", "."), 2, ("--answers . is a folder",)),
        (("build-index", "-"), 2, ("standard input", "--output")),
        (("build-index", "doc.txt", "--model", "no-such-model"), 2, ("no-such-model", "sparsekv models list")),
        (("build-index", "doc.txt", "--method", "nonsense"), 2, ("'nonsense'", "squeezed")),
        ((*BUILD, "--levels", "0.01,0.05"), 2, ("--levels", "falling")),
        ((*BUILD, "--levels", "many"), 2, ("--levels many", "numbers separated by commas")),
        ((*BUILD, "--space", "outer"), 2, ("--space outer", "normalised")),
        ((*BUILD, "--sinks", "0"), 2, ("--sinks 0",)),
        ((*BUILD, "--chunk-size", "0"), 2, ("--chunk-size 0",)),
        ((*BUILD, "--device", "tpu"), 2, ("--device tpu", "cpu")),
        ((*BUILD, "--dtype", "int3"), 2, ("--dtype int3", "float32")),
        ((*BUILD, "--kv-dtype", "int9"), 2, ("--kv-dtype int9", "choose one of auto, int8", "did you mean int8")),
        ((*BUILD, "--rope-scaling", "yarn"), 2, ("--rope-scaling yarn", "FACTOR")),
        (("generate", "Why?", "--method", "nonsense"), 2, ("'nonsense'", "squeezed")),
        (("generate", "Why?", "--method", ""), 2, ("no method ''", "squeezed")),
        (
            ("generate", "Why?", "--prefill", "quoka", "--prefill-budget", ""),
            2,
            ("--prefill-budget '' is not a budget",),
        ),
        (("generate", "Why?", "--method", "all"), 2, ("name one method, not all", "squeezed", "dense")),
        (("generate", "Why?", "--prefill", "all"), 2, ("--prefill all: name one method",)),
        (
            ("eval", "doc.txt", "--question-prefill", "all"),
            2,
            ("--question-prefill all: questions are prefilled with one method",),
        ),
        (("eval", "doc.txt", "--question-prefill", "mine"), 2, ("--question-prefill mine: no method", "dense, own")),
        (
            ("generate", "Why?", "--prefill", "own", "--prefill-budget", "5%"),
            2,
            ("--prefill-budget 5%: this option needs --prefill", "--prefill own has the answer's budget"),
        ),
        (("generate", "Why?", "--budget", "0"), 2, ("--budget 0", "0.05")),
        (("generate", "Why?", "--budget", "2.5"), 2, ("--budget 2.5",)),
        (("generate", "Why?", "--budget", "-1"), 2, ("--budget -1",)),
        (("generate", "Why?", "--budget", "some"), 2, ("--budget some",)),
        (("generate", "Why?", "--temperature", "-1"), 2, ("--temperature -1",)),
        (("generate", "Why?", "--top-p", "2"), 2, ("--top-p 2",)),
        (("generate", "Why?", "--top-p", "0.5"), 2, ("--top-p 0.5", "--temperature 0", "leave --top-p out")),
        (("generate", "Why?", "--top-k", "0"), 2, ("--top-k 0",)),
        (("generate", "Why?", "--max-new-tokens", "0"), 2, ("--max-new-tokens 0",)),
        (("generate", "Why?", "--method", "squeezed", "--page-size", "8"), 2, ("--page-size", "squeezed")),
        (("generate", "Why?", "--lookup", "deep"), 2, ("--lookup deep", "hierarchical")),
        (("generate", " "), 2, ("question is empty",)),
        (("generate", "Why?", "--prompt-file", "doc.txt"), 2, ("once",)),
        (("generate", "--prompt-file", "none.txt"), 2, ("none.txt", "no such file")),
        (("generate", "Why?", "--batch-file", "doc.txt"), 2, ("--batch-file",)),
        (("generate", "Why?", "--index", "none.skv"), 2, ("none.skv", "build-index")),
        (("generate", "Why?", "--model", "none"), 2, ("none", "models list")),
        (("generate", "Why?", "--schedule", "often"), 2, ("--schedule often", "0.15-step-4")),
        (("generate", "Why?", "--schedule", "0.1-step-4"), 2, ("multipole has no --step; give --budget 0.1 instead",)),
        (
            ("generate", "Why?", "--schedule", "0.1-step-4", "--method", "auto"),
            2,
            ("--schedule 0.1-step-4: multipole has no --step; give --budget 0.1 instead",),
        ),
        (
            ("generate", "Why?", "--schedule", "0.1-step-4", "--method", "dense"),
            2,
            ("--schedule 0.1-step-4 has no effect with --method dense",),
        ),
        (("generate", "Why?", "--schedule", "0.1-step-4", "--budget", "0.1"), 2, ("--schedule", "leave")),
        (("generate", "Why?", "--placement", "tape"), 2, ("--placement tape", "disk")),
        (("generate", "Why?", "--guard", "2"), 2, ("--guard 2", "0.2")),
        (("generate", "Why?", "--guard", "0.2", "--method", "quest"), 2, ("--guard", "quest", "--residual")),
        (("recall-report", "--guard", "0"), 2, ("--guard 0", "0.2")),
        (("recall-report", "--budget", "0"), 2, ("--budget 0",)),
        (("recall-report", "--method", "nonsense"), 2, ("'nonsense'", "oracle")),
        (("recall-report", "--by", "token"), 2, ("--by token", "layer,head")),
        (("recall-report", "--json", "--csv"), 2, ("--json", "--csv")),
        (("recall-report", "--latex", "--json"), 2, ("--json and --latex exclude each other",)),
        (("tune", "--latex", "--markdown", "--target-recall", "0.9"), 2, ("--latex and --markdown exclude",)),
        (("recall-report", "--plot", "none/x.png"), 2, ("none/x.png", "folder")),
        (("recall-report", "--queries", "none.txt"), 2, ("none.txt", "no such file")),
        (("tune",), 2, ("--target-recall 0.9", "--target-error")),
        (("tune", "--target-recall", "0.9", "--target-error", "0.1"), 2, ("one target",)),
        (("tune", "--target-recall", "0.9", "--model", "x"), 2, ("--model x", "only --target-perplexity")),
        (("tune", "--target-recall", "0.9", "--dtype", "x"), 2, ("--dtype x", "only --target-perplexity")),
        (("tune", "--target-recall", "1"), 2, ("--target-recall 1", "between 0 and 1")),
        (("tune", "--target-error", "0"), 2, ("--target-error 0", "between 0 and 1")),
        (("tune", "--target-recall", "0.9", "--method", "nonsense"), 2, ("'nonsense'", "quest")),
        (("tune", "--target-recall", "0.9", "--method", "oracle"), 2, ("--method oracle", "choose another")),
        (("eval",), 2, ("--data", "--format")),
        (("eval", "doc.txt", "--seed", "-1"), 2, ("--seed", "greater than or equal to 0")),
        (("generate", "Why?", "--seed", str(10**20)), 2, (f"--seed {10**20}", f"from -{2**63 - 1} to {2**63 - 1}")),
        (("generate", "Why?", "--seed", str(-(10**20))), 2, (f"--seed -{10**20}", f"from -{2**63 - 1}")),
        (("eval", "doc.txt", "--data", "x.jsonl", "--format", "ruler"), 2, ("give either a text",)),
        (
            ("eval",),
            2,
            ("--task niah-facts needs a text: name a file, or give one of the tasks without a text, fwe, ",),
        ),
        (
            ("eval", "--task", "fwe", "--task", "vt"),
            2,
            ("--task vt needs a text: ", "or give --data FILE with --format"),
        ),
        (("eval", "--data", "x.jsonl"), 2, ("--data and --format belong together",)),
        (
            ("eval", "--data", "x.jsonl", "--format", "niah", "--length", "500", "--length", "900"),
            2,
            ("--length 500 --length 900: the documents of --data are cut to one length",),
        ),
        (("eval", "--data", "none.jsonl", "--format", "ruler"), 2, ("none.jsonl", "no such file")),
        (("eval", "--data", "doc.txt", "--format", "ruler"), 2, ("doc.txt, line 1", "JSON object")),
        (("eval", "--data", "doc.txt", "--format", "squad"), 2, ("--format squad", "longbench")),
        (("eval", "--data", "doc.txt", "--format", "ruler", "--task", "vt"), 2, ("leave out --task",)),
        (("eval", "none.txt"), 2, ("no such file", "none.txt")),
        (("eval", "-"), 2, ("standard input", "--work")),
        (("eval", "doc.txt", "--task", "nonsense"), 2, ("'nonsense'", "niah-single")),
        (("eval", "doc.txt", "--method", "nonsense"), 2, ("'nonsense'", "oracle")),
        (("eval", "doc.txt", "--prefill", "nonsense"), 2, ("--prefill nonsense", "dense")),
        (("eval", "doc.txt", "--method", "oracle", "--page-size", "8"), 2, ("--page-size", "oracle")),
        (("eval", "doc.txt", "--question-prefill", "nonsense"), 2, ("'nonsense'", "quoka")),
        (("eval", "doc.txt", "--question-prefill", "dense", "--question-budget", "0"), 2, ("--question-budget 0",)),
        (("eval", "doc.txt", "--question-budget", "5%"), 2, ("--question-budget 5%", "--question-prefill")),
        (("build-index", "-", "doc.txt", "-o", "indices"), 2, ("standard input has no name", "--output NAME.skv")),
        (("eval", "doc.txt", "--budget", "0"), 2, ("--budget 0",)),
        (("eval", "doc.txt", "--contexts", "0"), 2, ("--contexts 0",)),
        (("eval", "doc.txt", "--questions", "0"), 2, ("--questions 0",)),
        (("eval", "doc.txt", "--length", "0"), 2, ("--length 0",)),
        (("eval", "doc.txt", "--depth", "101"), 2, ("--depth 101", "percentage")),
        (("eval", "doc.txt", "--pairs", "none.jsonl", "--task", "qa"), 2, ("--pairs none.jsonl", "no such file")),
        (
            ("eval", "doc.txt", "--task", "qa", "--task", "vt", "--depth", "50"),
            2,
            ("--depth has no effect on --task qa or vt; leave it out",),
        ),
        (("eval", "doc.txt", "--pairs", "x", "--depth", "50"), 2, ("--depth has no effect on --task qa",)),
        (("eval", "doc.txt", "--pairs", "x", "--task", "vt"), 2, ("--pairs has no effect without --task qa",)),
        (("eval", "doc.txt", "--task", "qa", "--model", "model"), 2, ("--task qa", "--pairs FILE")),
        (("eval", "doc.txt", "--model", "model"), 2, ("--length is 4096 tokens", "give --length ")),
        (("eval", "doc.txt", "--model", "model", "--length", "50"), 2, ("--length 50 is too small for niah-facts",)),
        (
            ("eval", "doc.txt", "--model", "model", "--task", "fwe", "--length", "4096"),
            2,
            ("has positions for", "--length"),
        ),
        (("eval", "doc.txt", "--json", "--csv"), 2, ("--json", "--csv")),
        (("eval", "doc.txt", "--plot", "none/x.png"), 2, ("none/x.png", "folder")),
        (("eval", "doc.txt", "--model", "none"), 2, ("none", "models list")),
        (("inspect", "--layer", "99"), 2, ("--layer 99", "0, 1, 2")),
        (("inspect", "--nonsense"), 2, ("--nonsense",)),
        (("models", "pull", "no/such/model"), 2, ("no/such/model",)),
        (("nonsense",), 2, ("nonsense",)),
        (("help",), 2, ("no command 'help'", "--help")),
        (("generate", "Why?", "--index", "doc"), 2, ("no index at doc", "name doc.skv, which is there")),
        (("models",), 2, ("Missing command", "`sparsekv models --help`")),
        (("append",), 2, ("'MORE'", "`sparsekv append --help`")),
        (("completion", "bsh"), 2, ("SHELL': 'bsh' is not one of 'bash'",)),
        (("generate", "doc.skv", "Why?"), 2, ("(Why?)", "--index doc.skv")),
        (("append", "doc.txt", "more.txt"), 2, ("(more.txt)", "`sparsekv append --help`")),
        (("build-index", "doc.txt", "-m", "codes"), 2, ("codes is a method", "--method codes")),
        (("generate", "Why?", "-m", "codes"), 2, ("codes is a method", "--method codes")),
        (("recall-report", "--method", "quest,window"), 2, ("'quest,window'", "a --method of its own")),
    ],
)
def test_usage(place: Path, arguments: tuple[str, ...], code: int, says: tuple[str, ...]) -> None:
    before = sorted(place.rglob("*"))
    fails(code, *arguments, says=says)
    assert sorted(place.rglob("*")) == before


def test_an_evaluation_that_cannot_be_written(place: Path) -> None:
    run = ("eval", "doc.txt", "--model", "model", "--method", "dense", "--length", "600", "--contexts", "1", "-q")
    fails(1, *run, "--work", "doc.txt", says=("cannot write doc.txt/answers.jsonl", "--work"))


def test_no_index_and_two(place: Path) -> None:
    shutil.copytree("doc.skv", "other.skv")
    fails(2, "generate", "Why?", says=("doc.skv, other.skv", "--index"))
    shutil.rmtree("other.skv")
    shutil.rmtree("doc.skv")
    fails(2, "generate", "Why?", says=("no index in this folder", "build-index"))


def _other_family(place: Path) -> str:
    save_tiny(place / "other", "qwen3")
    return "other"


def _other_weights(place: Path) -> str:
    """The same config, and every weight of the embedding changed but those that the fingerprint samples."""
    model = FAMILIES["llama"]()
    with torch.no_grad():
        weights = model.get_input_embeddings().weight.view(-1)
        sampled = torch.arange(len(weights)) % (len(weights) // SAMPLES_PER_TENSOR) == 0
        weights.copy_(torch.where(sampled, weights, -weights))
    model.save_pretrained(place / "other")
    tiny_tokenizer().save_pretrained(place / "other")
    return "other"


def _other_template(place: Path) -> str:
    shutil.copytree(place / "model", place / "other")
    tiny_tokenizer("{% for m in messages %}{{ m['content'] }}{% endfor %}").save_pretrained(place / "other")
    return "other"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (_other_family, ("model config", "--model")),
        (_other_weights, ("probe", "other weights")),
        (_other_template, ("chat template", "--model")),
    ],
)
def test_an_index_of_another_model(place: Path, make: Callable[[Path], str], says: tuple[str, ...]) -> None:
    fails(1, "generate", "Why?", "--model", make(place), says=("differs", "built with", "build the index again", *says))


def test_a_residual_without_value_centroids_fails_before_a_model_is_looked_for(place: Path) -> None:
    manifest = read_manifest(place / "doc.skv")
    files = {
        name: record.model_copy(
            update={"tensors": {key: one for key, one in record.tensors.items() if "value_centroids" not in key}}
        )
        for name, record in manifest.files.items()
    }
    older = manifest.model_copy(update={"files": files})
    (place / "doc.skv" / "manifest.json").write_bytes(manifest_bytes(older)[0])
    for command in (("generate", "Why?", "--method", "squeezed"), ("recall-report", "--queries", "doc.txt")):
        fails(2, *command, "--residual", "--model", "none", says=("--residual", "--method multipole"))


def test_an_answer_that_fills_the_positions_is_told_so(place: Path) -> None:
    left = POSITIONS - read_manifest(place / "doc.skv").split.tokens
    (place / "long.txt").write_text("y" * (left - 60))
    told = run_here("generate", "--prompt-file", "long.txt", "--max-new-tokens", "99999", "--budget", "5%").stderr
    assert "(the model has no more positions)" in told


def test_a_question_longer_than_the_positions(place: Path) -> None:
    (place / "long.txt").write_text("why " * 1000)
    fails(2, "generate", "--prompt-file", "long.txt", says=("4096 positions", "--rope-scaling"))
    fails(2, "recall-report", "--queries", "long.txt", says=("4096 positions", "--rope-scaling"))


def test_an_evaluated_answer_longer_than_the_positions(place: Path) -> None:
    asked = ("eval", "doc.txt", "--model", "model", "--task", "niah-single", "--length", "500", "--work", "work")
    fails(2, *asked, "--max-new-tokens", "9999", says=("take all positions of", "smaller --max-new-tokens"))
    fails(2, *asked, "--max-new-tokens", "3800", says=("a document of niah-single has", "has positions for"))


def test_more_dense_layers_than_the_evaluated_model_has(place: Path) -> None:
    asked = ("eval", "doc.txt", "--model", "model", "--length", "500", "--work", "work")
    fails(2, *asked, "--dense-layers", "4", says=("--dense-layers 4: the model has 3 layers", "from 0 to 3"))


def test_debug_shows_the_traceback(place: Path) -> None:
    outcome = run_here("--debug", "generate", "Why?", "--budget", "0")
    assert outcome.code == 2
    assert "Traceback" in outcome.stderr
    assert outcome.stderr.splitlines()[-1].startswith("sparsekv: error: --budget 0")

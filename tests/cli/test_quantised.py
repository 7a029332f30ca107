"""Commands with quantised checkpoints: answers are those of plain transformers on the same checkpoint."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.command import fails, run_here
from support.quantised_models import KINDS, load_plainly, save_quantised
from support.tiny_models import END, PAD, save_tiny, tiny_tokenizer

pytestmark = pytest.mark.quantised

TEXT = "The manual names 12 parts, and 345 more that are spare; each part has a name and a place of its own.\n" * 7
TOKENS = 10


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARSEKV_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "doc.txt").write_text(TEXT)
    return tmp_path


def _run(*arguments: str) -> str:
    done = run_here(*arguments, "-q")
    assert done.code == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def _build(kind: str, *options: str) -> None:
    save_quantised(Path("model"), kind)
    _run("build-index", "doc.txt", "--model", "model", "-o", "doc.skv", "--tail", "16", *options)


def _answer(*options: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(_run("generate", "--max-new-tokens", str(TOKENS), "--json", *options))
    return answer


def _plain_answer(kind: str, question: str, more: str = "") -> str:
    """The greedy answer by transformers alone, over document and question."""
    tokenizer, model = tiny_tokenizer(), load_plainly(Path("model"))
    messages = [{"role": "user", "content": f"{TEXT}{more}\n\n{question}"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=TOKENS, do_sample=False, eos_token_id=END, pad_token_id=PAD)
    return str(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_transformers_own_token_for_token(kind: str, folder: Path) -> None:
    _build(kind, "--method", "codes")
    expected = _plain_answer(kind, "Where?")
    for options in (["--method", "dense"], ["--method", "codes", "--budget", "100%"]):
        assert _answer("-i", "doc.skv", "Where?", *options)["text"] == expected


@pytest.mark.parametrize("kind", ["torchao-int8", "torchao-int4", "compressed-4"])
def test_appended_text_and_batches_are_answered_alike(kind: str, folder: Path) -> None:
    _build(kind, "--method", "codes")
    more = "\n\nA last line on the place of the spare parts.\n"
    Path("more.txt").write_text(more.lstrip())
    _run("append", "more.txt", "-i", "doc.skv")
    every = ["--method", "codes", "--budget", "100%"]
    expected = _plain_answer(kind, "Where?", more)
    assert _answer("-i", "doc.skv", "Where?", *every)["text"] == expected
    Path("questions.txt").write_text("Where?\nWho is it?\n")
    answers = _run(
        "generate", "-i", "doc.skv", "--batch-file", "questions.txt", "--max-new-tokens", str(TOKENS), "--json", *every
    )
    assert [json.loads(line)["text"] for line in answers.splitlines()] == [
        expected,
        _plain_answer(kind, "Who is it?", more),
    ]


def test_a_saved_conversation_and_reports_take_a_quantised_model(folder: Path) -> None:
    _build("torchao-int8", "--method", "codes", "--method", "multipole")
    _answer("-i", "doc.skv", "Where?", "--save-to", "talk.skv")
    assert _answer("-i", "talk.skv", "And who?")["generated_tokens"] > 0
    rows = json.loads(_run("recall-report", "-i", "doc.skv", "--budget", "100%", "--json"))["rows"]
    assert [row["recall"] for row in rows if row["method"] == "codes"] == [1.0, 1.0]
    assert json.loads(_run("trace", "-i", "doc.skv", "Where?", "--max-new-tokens", "2", "--json"))["answer"]


def test_rounded_activations_differ_within_the_tolerance(folder: Path) -> None:
    """Which in float32 is that of bfloat16: they are rounded to 8 bits."""
    _build("torchao-int8-activations", "--method", "codes")
    assert _answer("-i", "doc.skv", "Where?", "--method", "dense")["generated_tokens"] > 0


def test_another_quantisation_of_the_same_model_is_refused(folder: Path) -> None:
    _build("torchao-int8", "--method", "codes")
    for other in ("torchao-int4", None):
        shutil.rmtree("model")
        save_tiny(Path("model")) if other is None else save_quantised(Path("model"), other)
        fails(
            1,
            "generate",
            "-i",
            "doc.skv",
            "Where?",
            "--model",
            "model",
            says=("quantisation differs: the index was built with torchao",),
        )


def test_a_method_that_does_not_run_here_is_refused_before_anything_is_written(folder: Path) -> None:
    config = json.loads((save_tiny(Path("model")) / "config.json").read_text())
    Path("model", "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "aqlm"}}))
    fails(2, "build-index", "doc.txt", "--model", "model", says=("quantised by aqlm", "`pip install"))
    assert not Path("doc.skv").exists()


@pytest.mark.parametrize("kind", ["torchao-int8", "fp8"])
def test_quantised_weights_are_not_rounded_again(kind: str, folder: Path) -> None:
    """Even where transformers has unpacked them."""
    save_quantised(Path("model"), kind)
    refused = ("--weights int8: model", "is quantised already; leave the option out", "or give --model the index's")
    fails(2, "build-index", "doc.txt", "--model", "model", "--weights", "int8", says=refused)
    assert not Path("doc.skv").exists()

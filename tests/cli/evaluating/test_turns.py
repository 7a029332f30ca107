"""`eval --turns`: each question follows the earlier ones with their expected answers, as in plain transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command import run_here
from support.tiny_models import CHAT_TEMPLATE, END, tiny_tokenizer
from transformers import AutoModelForCausalLM

ASKED = [("The first: ", "alpha"), ("The second: ", "beta"), ("The third: ", "gamma")]
FEW = ("--model", "model", "--max-new-tokens", "4", "--tail", "64", "--work", "work")
DATA = ("--data", "scbench_kv.jsonl", "--format", "scbench")
HEAD = "Extract the value corresponding to the specified key in the JSON object below.\n\n"


def _write(*turns: tuple[str, str]) -> None:
    record = {
        "context": Path("doc.txt").read_text(),
        "multi_turns": [{"input": request, "answer": answer} for request, answer in turns],
    }
    Path("scbench_kv.jsonl").write_text(json.dumps(record))


def _rows(*options: str) -> list[dict[str, Any]]:
    outcome = run_here("eval", *FEW, *options, "--json", "-q")
    assert outcome.code == 0, outcome.stderr
    rows: list[dict[str, Any]] = json.loads(outcome.stdout)["rows"]
    return rows


def _answers() -> dict[str, str]:
    records = [json.loads(line) for line in Path("work/answers.jsonl").read_text().splitlines()]
    return {one["question"].strip(): one["text"] for one in records if one["method"] == "dense"}


@torch.inference_mode()
def _plain(text: str) -> str:
    tokenizer = tiny_tokenizer()
    model = AutoModelForCausalLM.from_pretrained("model", dtype=torch.float32, attn_implementation="eager")
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    said = model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=END, pad_token_id=END)
    return str(tokenizer.decode(said[0, ids.shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize("raw", [False, True])
def test_a_turn_follows_the_earlier_ones_with_their_expected_answers(place: Path, *, raw: bool) -> None:
    _write(*ASKED)
    _rows(*DATA, "--turns", "--method", "dense", *(("--raw",) if raw else ()))
    document, text, messages = HEAD + (place / "doc.txt").read_text(), "", []
    for request, answer in ASKED:
        # The first message has the document and a request that begins with its own blank line.
        asked = request if messages else f"{document}\n\n{'' if raw else chr(10) * 2}{request}"
        text += f"\n\n{request}" if text else asked
        messages.append({"role": "user", "content": asked})
        whole = tiny_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert _answers()[request.strip()] == _plain(text if raw else str(whole))
        text += answer
        messages.append({"role": "assistant", "content": answer})


def test_the_table_has_a_row_for_all_turns_and_for_each(place: Path) -> None:
    _write(*ASKED, ASKED[0])
    how = (*DATA, "--method", "oracle", "--budget", "5%", "--budget", "100%")
    rows = _rows(*how, "--turns")
    found = [(row["turn"], row["method"], row["budget"], row["questions"]) for row in rows]
    ways = [("dense", None), ("oracle", 0.05), ("oracle", 1.0)]
    assert found == [(turn, *way, 1 if turn else 4) for turn in (None, 1, 2, 3, 4) for way in ways]
    for row in rows:
        assert (row["difference"] is None) == (row["method"] == "dense")
        if row["budget"] == 1.0:
            assert (row["difference"], row["same_as_dense"]) == (0, 100)
    # The last question is the first one again, and counts twice.
    assert [(row["turn"], row["questions"]) for row in _rows(*how)] == [(None, 4)] * 3
    table = run_here("eval", *FEW, *how, "--turns", "-q").stdout
    assert table.count("scbench_kv: 4 questions") == 1
    assert all(word in table for word in (" turn ", " all ", " 4 "))


def test_generated_questions_are_turns_too(place: Path) -> None:
    task = ("doc.txt", "--task", "scbench-kv", "--task", "vt", "--length", "2000", "--contexts", "1")
    (place / "doc.txt").write_text("Nothing is said here. " * 200)
    rows = _rows(*task, "--questions", "2", "--turns", "--method", "dense")
    assert [(row["task"], row["turn"]) for row in rows] == [(t, n) for t in ("scbench-kv", "vt") for n in (None, 1, 2)]


def test_turns_of_one_question_are_refused(place: Path) -> None:
    _write(ASKED[0])
    outcome = run_here("eval", *FEW, *DATA, "--turns")
    assert outcome.code == 2
    assert "--turns has no effect on contexts with one question; leave it out" in outcome.stderr


def test_turns_without_expected_answers_are_refused(place: Path) -> None:
    (place / "doc.txt").write_text("Nothing is said here. " * 200)
    outcome = run_here("eval", "doc.txt", *FEW, "--task", "long-answer", "--length", "500", "--turns", "-q")
    assert outcome.code == 2
    assert "--turns needs expected answers, and long-answer has none; leave one of them out" in outcome.stderr


def test_a_template_of_one_turn_is_refused(place: Path) -> None:
    _write(*ASKED)
    model = Path("once")
    shutil.copytree("model", model)
    Path("model").unlink()
    one = "{% if messages|length > 1 %}{{ raise_exception('one') }}{% endif %}"
    tiny_tokenizer(one + CHAT_TEMPLATE).save_pretrained(model.rename("model"))
    outcome = run_here("eval", *FEW, *DATA, "--turns", "-q")
    assert outcome.code == 2
    assert outcome.stderr.count("\n") == 1
    assert "chat template has no second turn; leave --turns out, or give --raw" in outcome.stderr

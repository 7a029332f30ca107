"""`generate --batch-size` and `--resume`."""

import errno
import fcntl
import json
import re
import shutil
from pathlib import Path

import pytest
from support.command import run_here, start, with_options

ASK = ("generate", "--model", "model", "--max-new-tokens", "5", "-q", "--batch-file", "questions.txt")
QUESTIONS = ("What is 3 times 3?", "Why?", "", "Which line says that 7 times 7 is 49?", "How many lines are there?")


@pytest.fixture(autouse=True)
def questions(place: Path) -> None:
    Path("questions.txt").write_text("\n".join(QUESTIONS) + "\n")


def answers(*options: str) -> list[dict[str, object]]:
    outcome = run_here(*with_options(ASK, "--json", *options))
    assert outcome.code == 0, outcome.stderr
    return [json.loads(line) for line in outcome.stdout.splitlines()]


@pytest.mark.parametrize("size", ["auto", "2", "9"])
def test_answers_come_in_the_order_of_their_lines(size: str) -> None:
    """And are what each is alone, where all of the document is attended to."""
    alone = answers("--batch-size", "1", "--budget", "100%")
    found = answers("--batch-size", size, "--budget", "100%")
    assert [one["question"] for one in found] == list(QUESTIONS)
    assert [one["text"] for one in found] == [one["text"] for one in alone]
    assert [list(one) for one in found] == [list(one) for one in alone]


def test_questions_share_what_a_step_reads() -> None:
    alone, found = answers("--batch-size", "1", "--budget", "5"), answers("--batch-size", "4", "--budget", "5")
    pairs = [(one["kv_fraction"], of_all["kv_fraction"]) for one, of_all in zip(alone, found, strict=True)]
    assert all(one < of_all for one, of_all in pairs if one)  # type: ignore[operator]


@pytest.mark.parametrize("size", ["0", "-1", "many", "1.5"])
def test_a_size_that_there_is_not(size: str) -> None:
    refused = run_here(*ASK, "--batch-size", size)
    assert refused.code == 2
    assert f"--batch-size {size}: give auto, or a whole number of at least 1" in refused.stderr


def test_a_size_without_a_batch() -> None:
    refused = run_here("generate", "Why?", "--model", "model", "--batch-size", "4")
    assert refused.code == 2
    assert "--batch-size 4 has no effect without --batch-file; leave it out" in refused.stderr


def test_why_an_answer_ends() -> None:
    reasons = {one["question"]: one["finish_reason"] for one in answers()}
    assert reasons.pop("") == ""
    assert set(reasons.values()) <= {"stop", "length"}
    assert {one["finish_reason"] for one in answers("--batch-size", "1", "--max-new-tokens", "1")} == {"length", ""}


def test_what_cannot_be_shared_is_answered_one_by_one_or_refused() -> None:
    for alone in (("--guard", "0.2"), ("--method", "magicpig"), ("--gauge",)):
        refused = run_here(*ASK, "--batch-size", "2", *alone)
        assert refused.code == 2
        assert "give --batch-size 1" in refused.stderr
        assert len(answers(*alone)) == len(QUESTIONS)


def test_what_was_answered_is_not_asked_again() -> None:
    whole = run_here(*ASK, "--json", "--resume", "answers.jsonl").stdout
    assert Path("answers.jsonl").read_text() == whole
    lines = whole.splitlines(keepends=True)
    # Killed within the third line.
    changed = lines[0].replace('"text": "', '"text": "as it was: ')
    Path("answers.jsonl").write_text(changed + lines[1] + lines[2][:30])
    resumed = run_here(*ASK, "--json", "--resume", "answers.jsonl")
    assert resumed.code == 0, resumed.stderr
    assert Path("answers.jsonl").read_text() == resumed.stdout
    assert resumed.stdout.startswith(changed + lines[1])
    assert [json.loads(line)["question"] for line in resumed.stdout.splitlines()] == list(QUESTIONS)
    # With nothing left to ask no model is needed.
    Path("model").unlink()
    assert run_here(*ASK, "--json", "--resume", "answers.jsonl").stdout == resumed.stdout


def test_answers_are_not_redirected_to_the_file_that_they_are_added_to() -> None:
    same = Path("same.jsonl").resolve()
    refused = start(*ASK, "--json", "--resume", same.name, cwd=same.parent, stdout=str(same)).wait()
    assert refused.code == 2
    assert "--resume same.jsonl: standard output is redirected to the same file" in refused.stderr
    assert Path("same.jsonl").read_bytes() == b""


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("hello", "line 1 is not an answer as --json prints it; name another file"),
        ('{"question": "What else?"}', "line 1 answers another question; name another file"),
        (
            '{"question": "What is 3 times 3?", "method": "quest"}',
            "line 1 was answered with --method quest, not multipole; ",
        ),
    ],
)
def test_a_file_of_other_answers_is_refused(line: str, says: str) -> None:
    Path("answers.jsonl").write_text(f"{line}\n")
    refused = run_here(*ASK, "--json", "--resume", "answers.jsonl")
    assert refused.code == 2
    assert f"--resume answers.jsonl: {says}" in refused.stderr
    assert Path("answers.jsonl").read_text() == f"{line}\n"


def test_answers_to_more_questions_than_there_are_stay() -> None:
    whole = run_here(*ASK, "--json", "--resume", "answers.jsonl").stdout
    Path("answers.jsonl").write_text(whole + whole.splitlines(keepends=True)[0])
    refused = run_here(*ASK, "--json", "--resume", "answers.jsonl")
    assert refused.code == 2
    assert f"the file has more answers than the {len(QUESTIONS)} questions given; give all questions" in refused.stderr
    assert Path("answers.jsonl").read_text().startswith(whole)


def test_answers_cannot_be_added_where_there_is_no_folder() -> None:
    refused = run_here(*ASK, "--json", "--resume", "nowhere/answers.jsonl")
    assert refused.code == 2
    assert "cannot be written: No such file or directory; create its folder" in refused.stderr


def test_times_say_which_question_they_are_of() -> None:
    told = run_here(*ASK, "--stats").stderr
    assert [f"question {number}: " in told for number in (0, 1, len(QUESTIONS))] == [False, True, True]


@pytest.mark.parametrize("content", ['{"my": "precious"}', "What is 3 times 3?", '{"question": "What else', "\r\n\r"])
def test_only_the_beginning_of_an_answer_is_cut_off(content: str) -> None:
    Path("notes.json").write_bytes(content.encode())
    refused = run_here(*ASK, "--json", "--resume", "notes.json")
    assert refused.code == 2
    assert "--resume notes.json: line 1 is not an answer as --json prints it" in refused.stderr
    assert Path("notes.json").read_bytes() == content.encode()


def test_what_comes_after_the_last_answer_is_not_cut_off() -> None:
    whole = run_here(*ASK, "--json", "--resume", "answers.jsonl").stdout
    Path("answers.jsonl").write_text(f"{whole}my notes")
    refused = run_here(*ASK, "--json", "--resume", "answers.jsonl")
    assert refused.code == 2
    assert f"--resume answers.jsonl: line {len(QUESTIONS) + 1} is not an answer" in refused.stderr
    assert Path("answers.jsonl").read_text() == f"{whole}my notes"


@pytest.mark.parametrize("name", ["/dev/null", "."])
def test_what_is_no_file_takes_no_answers(name: str) -> None:
    refused = run_here(*ASK, "--json", "--resume", name)
    assert refused.code == 2
    assert (
        f"--resume {name}: this is not a regular file, so answers cannot be added to it; name another" in refused.stderr
    )


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EIO])
def test_a_file_system_without_locks_is_no_hindrance(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert run_here(*ASK, "--json", "--resume", "answers.jsonl").code == (2 if number == errno.EIO else 0)


@pytest.mark.parametrize(
    "begun", ["{", "\0\0", '{"quest\0', '{"question": "What is 3 ti', '{"question": "What is 3 times 3?", "text": "']
)
def test_the_beginning_of_the_first_answer_is_cut_off(begun: str) -> None:
    Path("answers.jsonl").write_text(begun)
    outcome = run_here(*ASK, "--json", "--resume", "answers.jsonl")
    assert outcome.code == 0, outcome.stderr
    assert Path("answers.jsonl").read_text() == outcome.stdout


def test_answers_do_not_go_where_the_questions_are() -> None:
    refused = run_here(*ASK, "--json", "--resume", "./questions.txt")
    assert refused.code == 2
    assert "--resume questions.txt: this is the file of the questions; name another file" in refused.stderr
    assert Path("questions.txt").read_text() == "\n".join(QUESTIONS) + "\n"


def test_one_run_at_a_time_adds_answers() -> None:
    with Path("answers.jsonl").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        refused = run_here(*ASK, "--json", "--resume", "answers.jsonl")
    assert refused.code == 2
    assert (
        "--resume answers.jsonl: another run is adding answers to it; wait until that run ends, or stop it"
        in refused.stderr
    )


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (("--max-new-tokens", "3"), "line 1 was answered with --max-new-tokens 5, not 3"),
        (("--temperature", "0.9"), "line 1 was answered with --temperature 0, not 0.9"),
        (("--residual", "--no-replace"), "line 1 was answered without --residual; "),
        (("--seed", "5"), "line 1 was answered with --seed 0, not 5"),
        (("--prefill", "own"), "line 1 was answered with --prefill dense, not own"),
        (("--prefill", "quoka", "--prefill-budget", "7"), "line 1 was answered with --prefill dense, not quoka, 7 of "),
        (("--guard", "0.5", "--batch-size", "1"), "line 1 was answered without --guard 0.5; "),
        (("--gauge", "--batch-size", "1"), "line 1 was answered without --gauge; "),
        (("--raw",), "line 1 was answered without --raw; "),
        (
            ("--no-replace", "--stream", "--buffer", "9"),
            "line 1 was answered with --replace and without --stream and with --buffer 128, not 9; ",
        ),
    ],
)
def test_answers_of_other_settings_are_not_mixed(other: tuple[str, ...], says: str) -> None:
    assert run_here(*ASK, "--json", "--resume", "answers.jsonl").code == 0
    lines = Path("answers.jsonl").read_text().splitlines(keepends=True)
    Path("answers.jsonl").write_text(lines[0])
    refused = run_here(*with_options(ASK, "--json", "--resume", "answers.jsonl", *other))
    assert refused.code == 2
    assert says in refused.stderr
    assert Path("answers.jsonl").read_text() == lines[0]


def test_answers_with_sources_and_without_are_not_mixed() -> None:
    first = run_here(*ASK, "--json", "--resume", "answers.jsonl", "--sources", "2").stdout.splitlines(keepends=True)[0]
    Path("answers.jsonl").write_text(first)
    refused = run_here(*ASK, "--json", "--resume", "answers.jsonl")
    assert (refused.code, "line 1 was answered with --sources 2; " in refused.stderr) == (2, True)
    assert Path("answers.jsonl").read_text() == first


def test_answers_that_ended_elsewhere_are_not_mixed(place: Path) -> None:
    """As of a model whose `generation_config.json` was corrected when the first answers did not end."""
    assert run_here(*ASK, "--json", "--resume", "answers.jsonl").code == 0
    first = Path("answers.jsonl").read_text().splitlines(keepends=True)[0]
    shutil.copytree(place / "model", "corrected")
    settings = Path("corrected", "generation_config.json")
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token_id": [0, 80]}))
    Path("model").unlink()
    Path("corrected").rename("model")
    Path("answers.jsonl").write_text(first)
    refused = run_here(*ASK, "--json", "--resume", "answers.jsonl")
    assert refused.code == 2
    assert "answers.jsonl: line 1 was answered with other EOS tokens (the model's generation_config" in refused.stderr
    assert Path("answers.jsonl").read_text() == first


def test_what_is_there_already_is_told() -> None:
    assert run_here(*ASK, "--json", "--resume", "answers.jsonl").code == 0
    again = run_here(*[one for one in ASK if one != "-q"], "--json", "--resume", "answers.jsonl")
    assert f"{len(QUESTIONS)} of {len(QUESTIONS)} answers are in answers.jsonl" in again.stderr


def test_several_questions_times_are_told_together() -> None:
    told = run_here(*[one for one in ASK if one != "-q"], "--stats").stderr
    asked = sum(bool(one) for one in QUESTIONS)  # a blank line is no question
    assert re.search(rf"^{asked} questions: \d+ tokens in [\d.]+ s, [\d.]+ a second in all$", told, re.M), told


def test_resuming_is_for_lines_of_json() -> None:
    refused = run_here(*ASK, "--resume", "answers.jsonl")
    assert (refused.code, "--resume needs --batch-file and --json" in refused.stderr) == (2, True)
    Path("folder").mkdir()
    assert "--resume folder: this is not a regular file" in run_here(*ASK, "--json", "--resume", "folder").stderr


@pytest.mark.parametrize(("first", "then", "says"), [("100%", "1", "100%, not 1"), ("1", "1.0", "1, not 100%")])
def test_answers_of_everything_are_none_of_one_token(first: str, then: str, says: str) -> None:
    whole = run_here(*ASK, "--json", "--resume", "answers.jsonl", "--budget", first).stdout
    refused = run_here(*ASK, "--json", "--resume", "answers.jsonl", "--budget", then)
    assert refused.code == 2
    assert f"line 1 was answered with --budget {says}; " in refused.stderr
    assert Path("answers.jsonl").read_text() == whole
    same = "1.0" if first == "100%" else "+1"
    assert run_here(*ASK, "--json", "--resume", "answers.jsonl", "--budget", same).stdout == whole

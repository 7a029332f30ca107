"""The Python API gives what the commands print."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, get_args

import numpy as np
import pytest
import torch
from support.command import run_here
from support.tiny_models import save_tiny

from sparsekv.formats.errors import IdentityError, UsageError
from sparsekv.kernels.common.given_rows import cache_argument
from sparsekv.runtime import api
from sparsekv.runtime.decoding.answer import Sampling
from sparsekv.runtime.serving.stream import Finish

QUESTION, SHORT = "Which word?", Sampling(max_new_tokens=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an index of a tiny model that the user has named."""
    folder = tmp_path_factory.mktemp("api")
    save_tiny(folder / "model")
    (folder / "doc.txt").write_text("A word and another. " * 40)
    methods = ("--method", "multipole", "--method", "squeezed")
    built = run_here("build-index", folder / "doc.txt", "--model", folder / "model", *methods, "-q")
    assert built.code == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def index(folder: Path) -> api.Index:
    return api.open_index(folder / "doc.skv")


def test_an_answer_is_the_commands(folder: Path, index: api.Index) -> None:
    ours = index.ask(QUESTION, SHORT, method="quest", budget="20%", page_size=8)
    options = ("--method", "quest", "--budget", "20%", "--page-size", "8", "--max-new-tokens", "5")
    printed = json.loads(run_here("generate", QUESTION, "-i", folder / "doc.skv", *options, "--json").stdout)
    assert (ours.text, ours.kv_fraction) == (printed["text"], printed["kv_fraction"])
    assert ours.generated_tokens == printed["generated_tokens"]


def test_one_asker_answers_many_questions_alike(index: api.Index) -> None:
    asker = index.asker("multipole", 0.2)
    first, other, again = (asker.ask(question, SHORT) for question in (QUESTION, "What else?", QUESTION))
    assert first.ids == again.ids
    assert first.prompt_tokens != other.prompt_tokens


def test_what_is_asked_wrongly_is_told_in_the_words_of_the_api(index: api.Index) -> None:
    with pytest.raises(UsageError, match="question is a list: give one text"):
        index.ask([QUESTION])  # type: ignore[arg-type]
    asker = index.asker("quest")
    for ask in (index.ask, asker.ask, asker.stream, lambda question, sampling: asker.ask_all([question], sampling)):
        with pytest.raises(UsageError, match=r"^sampling is 20: give sparsekv\.Sampling\(max_new_tokens"):
            ask(QUESTION, 20)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"^the question is empty; ask one$"):
            ask(" ", None)
    with pytest.raises(UsageError, match=r"budgit is not an argument of this call \(did you mean budget\?\)"):
        index.ask(QUESTION, budgit="5%")
    with pytest.raises(
        UsageError, match=r"max_tokens is not an argument of this call \(did you mean max_new_tokens\?\)"
    ):
        index.ask(QUESTION, max_tokens=20)
    with pytest.raises(UsageError, match=r"budget is not an argument of this call \(did you mean budgets\?\)"):
        index.recall_report(["quest"], budget="5%")
    with pytest.raises(UsageError, match=r"^budget lots is not a budget: give a share"):
        index.ask(QUESTION, budget="lots")
    with pytest.raises(UsageError, match=r"^hash_bits has no effect on quest; leave it out"):
        index.ask(QUESTION, method="quest", hash_bits=3)
    with pytest.raises(UsageError, match=r"^budget 0\.1 has no effect on window, which .*; leave it out$"):
        index.ask(QUESTION, method="window", budget=0.1)
    with pytest.raises(UsageError, match=r"^prefill_budget 64 has no effect on window"):
        index.ask(QUESTION, prefill="window", prefill_budget=64)
    with pytest.raises(UsageError, match=r"^residual has no effect on multipole"):
        index.ask(QUESTION, method="multipole", residual=True)
    with pytest.raises(UsageError, match=r"add it with `sparsekv build-index .* --method csattention`"):
        index.ask(QUESTION, method="csattention")
    with pytest.raises(UsageError, match=r"^top_p 0\.5 has no effect at temperature 0, .* or leave top_p out$"):
        Sampling(top_p=0.5)
    with pytest.raises(UsageError, match=r"^the question is empty; ask one$"):
        index.recall_report(["quest"], questions=["", QUESTION])
    with pytest.raises(
        UsageError, match=r"max_new_tokens is an argument of Sampling: give ask a Sampling\(max_new_tokens=20\)"
    ):
        index.ask(QUESTION, max_new_tokens=20)


def test_a_text_in_the_place_of_an_index_is_told(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"doc.txt is a text, not an index; name the index beside it, .*doc\.skv"):
        api.open_index(folder / "doc.txt")


@pytest.mark.parametrize("folder", [None, 3, b"doc.skv"])
def test_an_index_of_another_type_is_told(folder: object) -> None:
    with pytest.raises(UsageError, match=r"folder is a (NoneType|int|bytes): give the index's folder"):
        api.open_index(folder)  # type: ignore[arg-type]  # that is the point


def test_arguments_of_a_report_may_be_iterators(index: api.Index) -> None:
    expected = index.recall_report(["window", "quest"], ["10%"], by=["layer"], questions=[QUESTION])
    given: list[Any] = [np.array(["window", "quest"]), iter(["10%"])]
    assert index.recall_report(*given, by=iter(["layer"]), questions=iter([QUESTION])) == expected
    assert len(expected) > 1


def test_one_name_and_one_budget_are_lists_of_one(index: api.Index) -> None:
    assert index.recall_report("window", "10%") == index.recall_report(["window"], ["10%"])
    assert index.recall_report("window", 0.1) == index.recall_report(["window"], [0.1])  # type: ignore[arg-type]


def test_an_index_and_a_session_are_one_line_in_a_notebook(folder: Path, index: api.Index) -> None:
    assert repr(index).startswith(f"Index('{folder / 'doc.skv'}', ")
    assert "\n" not in repr(index)
    begin = f"Session({str(folder / 'doc.skv')!r}, {index.opened.artifact.manifest.model.id}, "
    assert repr(index.asker("quest", "20%")) == f"{begin}quest at 20%)"
    assert repr(index.asker("dense")) == f"{begin}dense)"


def test_indices_and_sessions_are_keys(folder: Path, index: api.Index) -> None:
    asker, other = index.asker("quest"), api.open_index(folder / "doc.skv", index)
    assert {index: 1, other: 2, asker: 3, index.asker("quest"): 4}[index] == 1
    assert index != other


def test_a_report_is_the_commands_row_by_row(folder: Path, index: api.Index) -> None:
    ours = index.recall_report(["squeezed", "window"], ["10%", 30], by=["layer"])
    options = ("--method", "squeezed", "--method", "window", "--budget", "10%", "--budget", "30")
    printed = run_here("recall-report", "-i", folder / "doc.skv", *options, "--by", "layer", "--json")
    by_layer = [row for row in json.loads(printed.stdout)["rows"] if row["layer"] is not None]
    assert ours == by_layer


def test_a_report_of_a_configured_method_on_questions(index: api.Index) -> None:
    (row,) = index.recall_report(["quest"], ["50%"], questions=[QUESTION, "What else?"], page_size=8)
    assert (row["method"], row["variant"], row["layer"]) == ("quest", "page_size=8", None)


def test_methods_are_those_that_can_run(index: api.Index) -> None:
    assert {"squeezed", "multipole", "quest", "oracle"} <= set(index.methods)


def test_a_wrong_argument_is_named(index: api.Index) -> None:
    with pytest.raises(UsageError, match="page_size has no effect on squeezed"):
        index.asker("squeezed", page_size=8)
    with pytest.raises(UsageError, match="no method 'nonsense'"):
        index.recall_report(["nonsense"])
    with pytest.raises(UsageError, match="by: a report has no rows by head; give layer or kv_head, or both"):
        index.recall_report(["window"], by=["head"])
    with pytest.raises(UsageError, match="questions is a str: give a list of texts"):
        index.asker("squeezed").ask_all(QUESTION)
    with pytest.raises(UsageError, match="budgets is empty; give at least one"):
        index.recall_report(["window"], [])
    with pytest.raises(UsageError, match="method is 5: give a string"):
        index.ask(QUESTION, method=5)
    with pytest.raises(UsageError, match="no method ''"):
        index.ask(QUESTION, method="")
    with pytest.raises(UsageError, match="prefill_budget '' is not a budget"):
        index.ask(QUESTION, prefill="quest", prefill_budget="")
    with pytest.raises(UsageError, match="placement is 3: give a string"):
        index.ask(QUESTION, placement=3)
    for ids in ([1, 2, 10**6], [-1]):
        with pytest.raises(UsageError, match="token ids that the model does not have"):
            index.asker("squeezed").ask(torch.tensor(ids))


def test_threads_that_ask_one_model_wait_for_each_other(index: api.Index) -> None:
    questions = [f"What is line {number}?" for number in range(6)]
    draws = [Sampling(5, temperature=1.0, seed=number) for number in range(6)]
    alone = [index.ask(one, draw, budget="5%").ids for one, draw in zip(questions, draws, strict=True)]
    before = index.opened.model.config._attn_implementation
    with ThreadPoolExecutor(3) as threads:
        asked = zip(questions * 2, draws * 2, strict=True)
        together = list(threads.map(lambda one: index.ask(*one, budget="5%").ids, asked))
    assert together == alone * 2
    assert index.opened.model.config._attn_implementation == before


def test_a_question_is_prefilled_as_asked(index: api.Index) -> None:
    """By everything, as by default, by what the answer's method selects, or by what another does: `--prefill`."""
    prefilled = [index.asker("window", prefill=how) for how in (None, "dense", "own", "quest")]
    assert [one.cache.layers[0].plan.own_prefill for one in prefilled] == [False, False, True, False]
    assert all(one.ask(QUESTION, SHORT).ids for one in prefilled)
    with pytest.raises(
        UsageError, match="prefill_budget 64: this option needs prefill with a method that selects tokens"
    ):
        index.asker("quest", prefill_budget="64")


def test_many_questions_are_answered_in_their_order(index: api.Index) -> None:
    asker = index.asker("multipole", "100%")
    questions = [QUESTION, "What else?", "Why?"]
    assert [one.ids for one in asker.ask_all(questions, SHORT, together=2)] == [
        asker.ask(question, SHORT).ids for question in questions
    ]
    with pytest.raises(UsageError, match="differ from question to question; ask one question at a time"):
        index.asker("magicpig").ask_all(questions)


def test_a_variant_says_only_what_the_method_does_not(index: api.Index) -> None:
    rows = [*index.recall_report([], ["10%"]), *index.recall_report("quest", "10%", page_size=8)]
    assert all(row["method"] not in row["variant"] for row in rows)
    assert rows[-1]["variant"] == "page_size=8"
    assert len({(row["method"], row["variant"]) for row in rows}) == len(rows)
    assert next(row for row in rows if row["method"] == "window")["variant"] == ""


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("max_new_tokens", 2.5, "max_new_tokens 2.5: give a whole number"),
        ("max_new_tokens", "5", "max_new_tokens '5': give a whole number"),
        ("max_new_tokens", True, "max_new_tokens True: give a whole number"),
        ("temperature", "hot", "temperature 'hot': give a number"),
        ("top_p", [0.5], r"top_p \[0.5\]: give a number"),
        ("seed", None, "seed None: give a whole number"),
    ],
)
def test_a_value_of_another_type_is_refused(name: str, value: object, wanted: str) -> None:
    with pytest.raises(UsageError, match=rf"^{wanted}$"):
        Sampling(**{name: value})  # type: ignore[arg-type]  # that is the point


def test_numpys_numbers_are_numbers() -> None:
    assert Sampling(max_new_tokens=np.int64(3), temperature=np.float32(0.5)).max_new_tokens == 3  # type: ignore[arg-type]


def test_arguments_of_another_type_are_refused(index: api.Index) -> None:
    for given, wanted in ({"page_size": "eight"}, "page_size 'eight'"), ({"residual": "maybe"}, "residual 'maybe'"):
        with pytest.raises(UsageError, match=f"^{wanted}: give "):
            index.asker("quest", **given)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(UsageError, match=r"^residual 'False': give "):
        index.recall_report("quest", residual="False")  # type: ignore[arg-type]  # that is the point
    for name in ("names", "by", "questions"):
        for wrong in (5, [5], [None]):
            with pytest.raises(UsageError, match=rf"^{name} has (5|None): give a text, or a list of texts$"):
                index.recall_report(**{name: wrong})  # type: ignore[arg-type]  # that is the point
    asker = index.asker("quest")
    for asked in ({"stop": 3}, {"stop": [None]}, {"logprobs": True}, {"timeout": "x"}):
        with pytest.raises(UsageError, match=": give "):
            asker.stream(QUESTION, **asked)  # type: ignore[arg-type]  # that is the point


def test_a_question_that_is_none_is_refused_alike_by_each_call(index: api.Index) -> None:
    asker = index.asker("quest")
    ways: list[tuple[str, Callable[[Any], object]]] = [
        ("question", lambda given: asker.ask(given, SHORT)),
        ("question", lambda given: asker.stream(given, SHORT)),
        ("questions[1]", lambda given: asker.ask_all([QUESTION, given], SHORT)),
    ]
    for name, ask in ways:
        for given in (None, 5, 2.5, [3], b"Why?", np.ones(3)):
            with pytest.raises(UsageError) as refused:
                ask(given)
            assert str(refused.value).startswith(f"{name} is a {type(given).__name__}: give a text, or a tensor")
        for ids in (torch.ones(1, 3), torch.ones(2), torch.ones(2) > 0, torch.tensor(3), torch.arange(0)):
            with pytest.raises(UsageError) as refused:
                ask(ids)
            assert str(refused.value).startswith(f"{name} is a tensor {list(ids.shape)} of {ids.dtype}: ")
        with pytest.raises(UsageError, match=r"the question has '\\ud800', half of a UTF-16 surrogate pair"):
            ask("a\ud800b")
    for several in (None, 5, torch.ones(2, 3)):
        with pytest.raises(UsageError, match=r"^questions is a "):
            asker.ask_all(several)  # type: ignore[arg-type]  # that is the point


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_token_ids_may_be_any_integers(index: api.Index, dtype: torch.dtype) -> None:
    asker, ids = index.asker("quest"), torch.tensor([7, 3, 9])
    expected, given = asker.ask(ids, SHORT).ids, ids.to(dtype)
    assert asker.ask(given, SHORT).ids == expected
    assert [one.ids for one in asker.ask_all([given, given], SHORT)] == [expected] * 2
    stream = asker.stream(given, SHORT)
    given.fill_(0)  # the caller's own tensor, of which the stream has a copy
    assert [token for piece in stream for token in piece.tokens] == expected


def test_callbacks_and_slots_are_checked_before_an_answer(index: api.Index) -> None:
    asker = index.asker("quest")
    for given in ({"on_text": 5}, {"stop": "x"}):
        with pytest.raises(UsageError, match=r"^(on_text is 5|stop is 'x'): give a function$"):
            asker.ask(QUESTION, SHORT, **given)  # type: ignore[arg-type]  # that is the point
    for together in (0, -1, 2.5, "2", True, None):
        with pytest.raises(UsageError, match="together"):
            asker.ask_all([QUESTION], SHORT, together=together)  # type: ignore[arg-type]  # that is the point
    assert asker.ask_all([], SHORT, together=10**9) == []
    (answer,) = asker.ask_all([QUESTION], SHORT, together=10**9)
    assert answer.ids == asker.ask(QUESTION, SHORT).ids


def test_indices_share_a_loaded_model(folder: Path, index: api.Index, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("Another text of some words. " * 40)
    built = run_here("build-index", tmp_path / "other.txt", "--model", folder / "model", "--method", "squeezed", "-q")
    assert built.code == 0, built.stderr
    other = api.open_index(tmp_path / "other.skv", index)
    assert other.opened.model is index.opened.model
    alone = api.open_index(tmp_path / "other.skv")
    assert other.ask(QUESTION, SHORT).text == alone.ask(QUESTION, SHORT).text
    with pytest.raises(UsageError, match=r"^model is a LlamaForCausalLM: give a folder"):
        api.open_index(tmp_path / "other.skv", index.opened.model)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(UsageError, match=r"^dtype 'bfloat16' has no effect: the model is"):
        api.open_index(tmp_path / "other.skv", index, dtype="bfloat16")


def test_an_index_of_another_model_is_refused(index: api.Index, tmp_path: Path) -> None:
    save_tiny(tmp_path / "other", "qwen3")
    (tmp_path / "other.txt").write_text("Another text of some words. " * 40)
    built = run_here("build-index", tmp_path / "other.txt", "--model", tmp_path / "other", "--method", "squeezed", "-q")
    assert built.code == 0, built.stderr
    with pytest.raises(IdentityError):
        api.open_index(tmp_path / "other.skv", index)


def test_the_models_own_generate_refuses_an_indexs_cache(index: api.Index) -> None:
    asker, model = index.asker("quest"), index.opened.model
    ids = torch.cat([index.opened.input_ids, index.opened.input_ids[-3:]])[None]
    with pytest.raises(UsageError, match=r"answers through sparsekv alone: ask with `asker\.ask`"):
        model.generate(ids, **cache_argument(model, asker.cache), max_new_tokens=2)  # type: ignore[operator]
    assert asker.ask(QUESTION, SHORT).text == index.ask(QUESTION, SHORT, method="quest").text


@pytest.mark.parametrize("reads", [False, True])
def test_a_fork_of_a_process_that_has_streamed_refuses_to_stream(index: api.Index, reads: bool) -> None:
    asker = index.asker("quest")
    stream = asker.stream(QUESTION, SHORT)
    pieces = iter(stream)
    first = next(pieces)
    if (child := os.fork()) == 0:
        signal.alarm(20)  # instead of a hang
        try:
            if reads:
                list(pieces)
            else:
                asker.stream(QUESTION, SHORT)
        except UsageError as error:
            os._exit(7 if "get_context('spawn')`, and open the index" in str(error) else 8)
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert "".join(piece.text for piece in [first, *pieces]) == asker.ask(QUESTION, SHORT).text


def _asks_in_a_fork(ask: Callable[[], object]) -> int:
    """The exit code of a fork that asks: 0 for an answer, 7 for the refusal, and a signal's for a hang."""
    if (child := os.fork()) == 0:
        signal.alarm(20)
        try:
            ask()
            os._exit(0)
        except UsageError as error:
            os._exit(7 if "forked after its parent had used a model" in str(error) else 8)
        finally:
            os._exit(9)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_fork_asks_only_where_it_waits_for_no_thread_of_its_parent(folder: Path, index: api.Index) -> None:
    asker, threads = index.asker("quest"), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert _asks_in_a_fork(lambda: asker.ask(QUESTION, SHORT)) == 0
        torch.set_num_threads(2)
        assert _asks_in_a_fork(lambda: asker.ask(QUESTION, SHORT)) == 7
        assert _asks_in_a_fork(lambda: api.open_index(folder / "doc.skv")) == 7
    finally:
        torch.set_num_threads(threads)


def test_a_fork_does_not_wait_for_a_thread_that_decodes(index: api.Index) -> None:
    asker, decoding, forked = index.asker("quest"), Event(), Event()

    def wait_for_the_fork() -> bool:
        decoding.set()
        return not forked.wait(20)

    with ThreadPoolExecutor(1) as other:
        answer = other.submit(asker.ask, QUESTION, SHORT, stop=wait_for_the_fork)
        assert decoding.wait(20)
        try:
            assert _asks_in_a_fork(lambda: index.asker("quest").ask(QUESTION, SHORT)) == 7
        finally:
            forked.set()
        assert answer.result().text == asker.ask(QUESTION, SHORT).text


LEAVES = """
import atexit, os, signal, sys
ended = []
atexit.register(lambda: print([piece.finish for piece in ended[0]][-1]))  # after sparsekv's own, which come last
import sparsekv
index = sparsekv.open_index(sys.argv[1])
ended.append(index.asker("quest").stream("Which word?", sparsekv.Sampling(max_new_tokens=4000)))
os.kill(os.getpid(), signal.SIGINT)
"""


def test_each_end_of_a_stream_has_a_row_in_the_page() -> None:
    page = (Path(api.__file__).parents[1] / "docs" / "how-to" / "python.md").read_text(encoding="utf-8")
    rows = page.partition("| `finish` |")[2].partition("\n\n")[0].splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == [*get_args(Finish)]


def test_ctrl_c_ends_a_process_with_its_unread_stream(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "leaves.py").write_text(LEAVES)
    command = [sys.executable, str(tmp_path / "leaves.py"), str(folder / "doc.skv")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stderr.splitlines()[-1], done.stdout) == ("KeyboardInterrupt", "cancelled\n")
    assert done.returncode in (-signal.SIGINT, 1)  # 1 if torch evaluates a string at exit, which resets Python's flag

"""A trace's page has the whole trace, exactly, in one small file."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.html_page import HOSTILE, WrittenPage
from support.trace_document import synthetic_trace
from support.trace_page import read_column, read_trace_page

from sparsekv.cli.pages.page import share_column, whole_column
from sparsekv.cli.pages.trace import describe_without, write_trace_page
from sparsekv.formats.errors import SparsekvError

LARGEST = 15_000_000


@pytest.fixture
def trace() -> dict[str, Any]:
    return synthetic_trace(500, 6, 3, 2, 0)


def without_truth(trace: dict[str, Any]) -> dict[str, Any]:
    """The same where dense attention is not known."""

    def row(one: dict[str, Any]) -> dict[str, Any]:
        passages = [[*entry[:3], 0.0] for entry in one["passages"]]
        missed = {"missed_tokens": []} if "missed_tokens" in one else {}
        unknown = dict.fromkeys(("recall", "attention_mass", "output_error")) if "recall" in one else {}
        return one | {"missed": None, "passages": passages} | missed | unknown

    groups = {name: [row(one) for one in trace[name]] for name in ("by_token", "by_head", "records")}
    unknown = {"recall": None, "attention_mass": None, "output_error": None, "kv_fraction": 0.09}
    return trace | groups | {"truth": False, "measures": unknown}


def test_the_page_holds_the_document_exactly(trace: dict[str, Any], tmp_path: Path) -> None:
    size = write_trace_page(trace, tmp_path / "trace.html")
    assert size == (tmp_path / "trace.html").stat().st_size
    assert json.dumps(read_trace_page(tmp_path / "trace.html"), sort_keys=True) == json.dumps(trace, sort_keys=True)


def test_a_trace_without_truth_and_one_of_two_answers(trace: dict[str, Any], tmp_path: Path) -> None:
    other = without_truth(trace) | {"without": {"passages": ["a"], "answer": "No.", "log_probability": [-1.5, -9.25]}}
    write_trace_page(other, tmp_path / "trace.html")
    assert read_trace_page(tmp_path / "trace.html") == other


def test_a_trace_of_nothing(trace: dict[str, Any], tmp_path: Path) -> None:
    nothing = {
        "answer_tokens": [],
        "sources": [],
        "passages": [],
        "by_token": [],
        "by_head": [],
        "records": [],
        "by_head_measures": [],
    }
    write_trace_page(trace | nothing, tmp_path / "trace.html")
    assert read_trace_page(tmp_path / "trace.html") == trace | nothing


def test_the_page_is_one_file_without_references(trace: dict[str, Any], tmp_path: Path) -> None:
    write_trace_page(trace, tmp_path / "trace.html")
    assert WrittenPage(tmp_path / "trace.html").references() == []
    assert [path.name for path in tmp_path.iterdir()] == ["trace.html"]


def test_hostile_texts_stay_text(trace: dict[str, Any], tmp_path: Path) -> None:
    write_trace_page(trace, tmp_path / "plain.html")
    passages = [{"start": number, "tokens": [text]} for number, text in enumerate(HOSTILE)]
    hostile = trace | {
        "passages": passages,
        "question": "".join(HOSTILE),
        "answer_tokens": list(HOSTILE),
        "sources": [trace["sources"][0] | {"path": text, "text": text, "tokens": [0, 1]} for text in HOSTILE],
        "index": HOSTILE[0],
    }
    write_trace_page(hostile, tmp_path / "hostile.html")
    assert read_trace_page(tmp_path / "hostile.html") == hostile
    tags = [[one.tag for one in WrittenPage(tmp_path / name).elements] for name in ("plain.html", "hostile.html")]
    assert tags[0] == tags[1]


def test_128k_tokens_of_a_large_model_are_below_15_megabytes(trace: dict[str, Any], tmp_path: Path) -> None:
    """36 layers of 8 KV heads and 100 answer tokens: each record as long as it can be, over and over."""
    document = synthetic_trace(131_072, 1, 36, 8, 0)
    record = {"passages": 16, "chosen_tokens": 8, "missed_tokens": 4}
    full = [
        one | {name: (one[name] * most)[:most] for name, most in record.items()} | {"token": token}
        for token in range(100)
        for one in document["records"]
    ]
    document |= {"records": full, "by_token": document["by_token"] * 100, "answer_tokens": ["a"] * 100}
    assert write_trace_page(document, tmp_path / "trace.html") < LARGEST


def test_a_file_of_somebody_is_left_alone(trace: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "mine.html").write_text("mine")
    with pytest.raises(SparsekvError, match="give --output another name"):
        write_trace_page(trace, tmp_path / "mine.html")
    assert (tmp_path / "mine.html").read_text() == "mine"


shares = st.none() | st.floats(0, 1) | st.floats(0, 1).map(lambda share: float(f"{share:.4g}"))


@given(st.lists(shares))
def test_shares_are_read_back_exactly(values: list[float | None]) -> None:
    assert read_column(share_column(values)) == values


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_whole_numbers_are_read_back_exactly(values: list[int]) -> None:
    assert read_column(whole_column(values)) == values


def test_shares_of_four_digits_take_two_bytes() -> None:
    values = [digits / 10**power for power in range(4, 11) for digits in (1000, 1001, 4567, 9999)]
    assert share_column([*values, 0.0, 1.0, None])["others"] == ""


@pytest.mark.parametrize(
    ("shown", "hidden", "told"),
    [
        (-2.0, -3.5, "4.48 times less likely"),
        (-8.0, -2.0, "403 times more likely"),
        (-1.0, -901.0, "over 1,000,000 times less likely"),
    ],
)
def test_a_change_of_likelihood_is_told_in_plain_numbers(shown: float, hidden: float, told: str) -> None:
    assert told in describe_without({"answer": "other words", "log_probability": [shown, hidden]})

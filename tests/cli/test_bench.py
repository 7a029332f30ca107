"""`bench` as a person runs it, on sizes so small that its times mean nothing."""

import csv
import io
import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command import run_here, with_options

from sparsekv.cli.benchmarking.output import MixtureIndexer
from sparsekv.indexing.indexers.interface import Indexer, indexers
from sparsekv.indexing.methods.squeezed import SqueezedIndexer
from sparsekv.runtime.benchmark import sources as bench_layers
from sparsekv.runtime.benchmark.layer import Shape, mixture
from sparsekv.runtime.benchmark.layer_timer import StepTiming
from sparsekv.runtime.benchmark.sources import index_mixture
from sparsekv.runtime.methods.oracle import OracleSelector
from sparsekv.runtime.selection.interface import Budget, Method, MiddleContext, Queries, Selection, Selector, methods

SHAPE = ("--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--context", "600")
BENCH = ("bench", *SHAPE, "--runs", "2", "--warm", "--budget", "10%", "-q")
ABOUT = {
    "machine",
    "torch",
    "device",
    "data",
    "seed",
    "shared",
    "heads",
    "kv_heads",
    "head_dim",
    "dtype",
    "kv_dtype",
    "caches",
    "copy_bandwidth",
    "indices",
    "refused",
    "rows",
}


def timed(*options: str) -> dict[str, Any]:
    """Return the document that `bench --json` prints."""
    outcome = run_here(*BENCH, *options, "--json")
    assert outcome.code == 0, outcome.stderr
    return dict(json.loads(outcome.stdout))


def row_of(found: dict[str, Any], method: str) -> dict[str, Any]:
    return next(dict(row) for row in found["rows"] if row["method"] == method)


def test_json_and_csv_say_the_same_of_every_method() -> None:
    found = timed("--method", "all")
    assert set(found) == ABOUT
    names = {field.name for field in fields(StepTiming)}
    assert all(set(row) == names for row in found["rows"])
    assert {row["method"] for row in found["rows"]} == {"dense", *methods()}
    fastest = min(row["median_ms"] for row in found["rows"] if row["variant"].startswith("sdpa"))
    for row in found["rows"]:
        assert row["speedup"] == fastest / row["median_ms"]
        assert (row["budget"], row["timed"]) == (None if row["method"] == "dense" else 0.1, "wall clock")
    outcome = run_here(*BENCH, "--method", "window", "--csv")
    rows = list(csv.DictReader(io.StringIO(outcome.stdout)))
    assert set(rows[0]) == names
    assert [row["method"] for row in rows] == ["dense"] * 3 + ["window"]


def test_a_table_and_a_plot_of_contexts_and_batches(tmp_path: Path) -> None:
    sizes = ("--context", "1K", "--batch", "1", "--batch", "2", "--method", "quest")
    outcome = run_here(*BENCH, *sizes, "--plot", str(tmp_path / "steps.png"))
    assert outcome.code == 0, outcome.stderr
    titles = [line for line in outcome.stdout.splitlines() if "batch" in line]
    assert [line.split(", 4 heads")[0] for line in titles] == [
        f"{tokens} tokens, batch {batch}" for tokens in ("600", "1,024") for batch in (1, 2)
    ]
    assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")


def test_options_of_methods_and_of_their_indices_reach_them() -> None:
    found = timed("--method", "squeezed", "--levels", "0.2,0.05", "--lookup", "hierarchical", "--iterations", "2")
    index = found["indices"]["squeezed"]
    assert (index["levels"], index["iterations"]) == ([0.2, 0.05], 2)
    hierarchical, flat = row_of(found, "squeezed"), row_of(timed("--method", "squeezed", "--levels", "0.2"), "squeezed")
    assert (hierarchical["variant"], flat["variant"]) == ("lookup hierarchical", "")
    assert hierarchical["kv_fraction"] < flat["kv_fraction"]
    variants = timed("--method", "squeezed", "--variants")
    forms = {row["variant"] for row in variants["rows"] if row["method"] == "squeezed"}
    assert forms == {"flat", "hierarchical", "flat threshold", "hierarchical threshold"}


def test_a_search_every_few_steps_is_timed_over_these() -> None:
    """Between two searches a step reads the chosen rows alone."""
    always, seldom = (
        row_of(timed("--method", "csattention", "--step", step), "csattention")["kv_fraction"] for step in ("1", "4")
    )
    chosen = round(0.1 * (600 - 138)) / (600 - 138)
    assert seldom - chosen == pytest.approx((always - chosen) / 4)


def test_questions_over_one_document(place: Path) -> None:
    shared = timed("--shared", "--batch", "16", "--method", "squeezed", "--method", "window")
    assert shared["shared"]
    assert {row["batch"] for row in shared["rows"]} == {16}
    one = timed("--shared", "--batch", "1", "--method", "squeezed")
    assert row_of(one, "squeezed")["kv_fraction"] < row_of(shared, "squeezed")["kv_fraction"] < 0.4
    # A document is read once for all.
    assert row_of(one, "dense")["bytes"] == row_of(shared, "dense")["bytes"]
    of_index = ("bench", "--runs", "2", "--warm", "-q", "-i", "doc.skv", "--plot", "questions.png")
    stored = run_here(*of_index, "--shared", "--batch", "2", "--batch", "3")
    assert stored.code == 0, stored.stderr
    assert "2 questions over one document" in stored.stdout
    assert "3 questions over one document" in stored.stdout
    assert Path("questions.png").read_bytes().startswith(b"\x89PNG")


def test_what_questions_cannot_share_has_no_row() -> None:
    refused = run_here(*BENCH, "--shared", "--batch", "3", "--method", "magicpig")
    assert refused.code == 1
    assert "magicpig over 600 tokens, batch 3, cannot be shared: each question represents" in refused.stderr


def test_a_search_every_few_steps_is_of_one_question() -> None:
    options = ("--method", "csattention", "--step", "4", "--shared", "--batch", "3")
    refused = run_here(*BENCH, *options)
    assert refused.code == 1
    assert "cannot be shared: the method keeps state of one question" in refused.stderr


def test_a_layer_of_an_index(place: Path) -> None:
    options = ("--runs", "2", "--warm", "--json", "-q", "--index", "doc.skv", "--layer", "1")
    outcome = run_here("bench", *options, "--method", "squeezed", "--method", "quest", "--budget", "100")
    assert outcome.code == 0, outcome.stderr
    found = json.loads(outcome.stdout)
    assert (found["data"], found["layer"]) == ("doc.skv", 1)
    assert {row["method"] for row in found["rows"]} == {"dense", "squeezed", "quest"}
    assert row_of(found, "squeezed")["budget_tokens"] == 100
    everything = run_here("bench", *options, "--method", "squeezed", "--budget", "100%")
    assert row_of(json.loads(everything.stdout), "squeezed")["output_error"] < 1e-5


@dataclass(frozen=True)
class Broken(Method):
    """Counts as sparsekv's own, whose selections are not checked."""

    __module__ = "sparsekv.tests"

    def prepare(self, context: MiddleContext) -> Selector:
        return BrokenSelector(context)


class BrokenSelector(OracleSelector):
    def select(self, queries: Queries, budget: Budget) -> Selection:
        chosen = super().select(queries, budget)
        weights = torch.full((*queries.query.shape[:3], chosen.rows.capacity), torch.nan)
        return replace(chosen, rows=replace(chosen.rows, log_weights=weights))


def test_a_step_whose_output_is_no_number_has_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "known", methods() | {"broken": Broken})
    outcome = run_here(*BENCH, "--method", "broken", "--method", "window", "--json")
    assert outcome.code == 1
    assert "error: broken at 10% over 600 tokens, batch 1, gave an output that is not finite" in outcome.stderr
    found = json.loads(outcome.stdout)
    assert len(found["refused"]) == 1
    assert {row["method"] for row in found["rows"]} == {"dense", "window"}


@pytest.mark.parametrize("name", sorted(indexers()))
def test_an_index_built_in_pieces_has_the_shapes_of_one_built_at_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexer: Indexer = indexers()[name]()
    data = mixture(Shape(600, 10, 5, 16), 1, 0, torch.device("cpu"), torch.float32, indexer.queries_wanted())
    whole = index_mixture(data, MixtureIndexer(indexer)).context.tensors
    monkeypatch.setattr(bench_layers, "HEADS_AT_ONCE", 2)
    pieces = index_mixture(data, MixtureIndexer(indexer)).context.tensors
    assert {key: (one.shape, one.dtype) for key, one in pieces.items()} == {
        key: (one.shape, one.dtype) for key, one in whole.items()
    }


def test_an_index_built_in_pieces_is_the_one_built_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU heads are clustered one by one anyway."""
    data = mixture(Shape(600, 10, 5, 16), 1, 0, torch.device("cpu"), torch.float32)
    whole = index_mixture(data, MixtureIndexer(SqueezedIndexer(levels=(0.1, 0.03))))
    monkeypatch.setattr(bench_layers, "HEADS_AT_ONCE", 2)
    pieces = index_mixture(data, MixtureIndexer(SqueezedIndexer(levels=(0.1, 0.03)))).context.tensors
    for name, tensor in whole.context.tensors.items():
        assert torch.equal(pieces[name], tensor), name
    order = whole.context.tensors["token_order"].sort(-1).values
    assert torch.equal(order, torch.arange(data.split.middle).expand(5, -1))


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--context", "many"), 2, ("--context many", "128K")),
        (("--context", "100"), 2, ("--context 100", "at least 512")),
        (("--method", "nonsense"), 2, ("'nonsense'", "squeezed")),
        (("--batch", "0"), 2, ("--batch 0",)),
        (("--budget", "0"), 2, ("--budget 0", "0.05")),
        (("--heads", "4", "--kv-heads", "3"), 2, ("--heads 4", "--kv-heads, which is 3")),
        (("--head-dim", "15"), 2, ("--head-dim 15", "even")),
        (("--method", "codes", "--code-bytes", "3"), 2, ("--code-bytes 3", "64")),
        (("--method", "pqcache", "--head-dim", "100"), 2, ("--pq-bytes 8", "100 channels")),
        (("--runs", "1"), 2, ("--runs 1", "at least 2")),
        (("--seed", "-1"), 2, ("--seed -1",)),
        (("--dtype", "int3"), 2, ("--dtype int3", "float32")),
        (("--device", "tpu"), 2, ("--device tpu", "cpu")),
        (("--kv-dtype", "int4"), 2, ("--kv-dtype int4", "int8")),
        (("--kv-dtype", "int8", "--device", "cpu"), 2, ("--kv-dtype int8", "on a CPU", "--device cuda")),
        (
            ("--index", "doc.skv", "--kv-dtype", "int8"),
            2,
            ("--kv-dtype", "the index determines this value", "leave the option out"),
        ),
        (("--shared",), 2, ("--shared", "--batch 16")),
        (("--layer", "1"), 2, ("--layer 1", "--index")),
        (("--method", "quest", "--lookup", "flat"), 2, ("--lookup", "quest", "leave it out")),
        (("--lookup", "deep"), 2, ("--lookup deep", "hierarchical")),
        (("--variants", "--lookup", "flat"), 2, ("--lookup", "leave it out")),
        (("--method", "multipole", "--lookup", "hierarchical", "--context", "600"), 2, ("one level", "--levels")),
        (("--json", "--csv"), 2, ("--json", "--csv")),
        (("--plot", "none/x.png"), 2, ("none/x.png", "folder")),
        (("--index", "none.skv"), 2, ("none.skv", "build-index")),
        (
            ("--index", "doc.skv", "--context", "8K"),
            2,
            ("--context", "the index determines this value", "leave the option out"),
        ),
        (("--index", "doc.skv", "--batch", "2"), 2, ("--batch", "the index determines this value")),
        (
            ("--index", "doc.skv", "--shared", "--batch", "999"),
            2,
            ("--batch 999", "half the number of queries of the index's tail"),
        ),
        (("--index", "doc.skv", "--layer", "99"), 2, ("--layer 99", "0, 1, 2")),
        (("--index", "doc.skv", "--method", "csattention"), 2, ("build-index doc.skv --method csattention",)),
        (("--index", "doc.skv", "--levels", "0.1"), 2, ("--levels", "leave it out")),
    ],
)
def test_usage(place: Path, options: tuple[str, ...], code: int, says: tuple[str, ...]) -> None:
    outcome = run_here(*with_options(("bench", "--runs", "2", "--warm", "-q"), *options))
    message = outcome.error()
    assert outcome.code == code, message
    for part in says:
        assert part in message, message

"""A new method is one class on each side, registered: built, opened, decoded with and reported by nothing else."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from support.configs import sparse
from support.reference import assert_close
from support.small_index import plain_logits, random_ids, reopen, small_plan, stepped_logits, with_changes

from sparsekv.formats.index.schema import layer_file
from sparsekv.indexing.build import build_index
from sparsekv.indexing.indexers.interface import Indexer, LayerInput, choose_indexers, indexers
from sparsekv.runtime.decoding.answer import Sampling, question_ids
from sparsekv.runtime.decoding.engine import generate
from sparsekv.runtime.reporting.recall import MeasuredQueries
from sparsekv.runtime.reporting.report import recall_report
from sparsekv.runtime.selection.interface import (
    Budget,
    Cost,
    Method,
    MiddleContext,
    Queries,
    Selection,
    Selector,
    methods,
    single_rows,
)
from sparsekv.runtime.selection.registry import choose_methods


@dataclass(frozen=True)
class LoudestIndexer(Indexer):
    by_default: ClassVar[bool] = True
    power: float = 2.0

    def build_layer(self, layer: LayerInput) -> dict[str, torch.Tensor]:
        norms = layer.values.float().norm(p=self.power, dim=-1)
        return {"order": norms.argsort(dim=1, descending=True)}


@dataclass(frozen=True)
class Loudest(Method):
    needs_index: ClassVar[bool] = True

    def prepare(self, context: MiddleContext) -> Selector:
        return LoudestSelector(context.tensors["order"])


class LoudestSelector(Selector):
    def __init__(self, order: torch.Tensor):
        self.order = order

    def select(self, queries: Queries, budget: Budget) -> Selection:
        tokens = budget.tokens(self.order.shape[1])
        starts = self.order[:, None, :tokens].expand(-1, 1 if queries.joint else queries.query.shape[2], -1)
        return Selection(single_rows(starts), Cost(0.0))


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry, thing in ((indexers, LoudestIndexer), (methods, Loudest)):
        monkeypatch.setattr(registry, "known", registry() | {"loudest": thing})


def test_a_registered_method_is_built_opened_decoded_with_and_reported(tmp_path: Path) -> None:
    assert "loudest" in choose_indexers([])
    plan = with_changes(small_plan(), methods={"loudest": LoudestIndexer(power=3.0)})
    manifest = build_index(plan, tmp_path / "toy.skv")
    assert manifest.methods["loudest"].parameters == {"seed": 0, "power": 3.0}
    assert layer_file("loudest", 0) in manifest.files
    index = reopen(plan, tmp_path / "toy.skv")
    assert choose_methods(["loudest"], list(manifest.methods)) == ["loudest"]

    cache = index.cache(sparse("loudest", Loudest(), Budget(1.0)))
    tokens = random_ids(8)
    plain = plain_logits(index.model, torch.cat([index.input_ids, tokens]))[-8:]
    assert_close(stepped_logits(index, cache, tokens, question=3), plain, 1e-4)
    few = index.cache(sparse("loudest", Loudest(), Budget(0.1)))
    answer = generate(index, few, question_ids(index, "Why?"), Sampling(max_new_tokens=4))
    assert answer.kv_fraction == pytest.approx(Budget(0.1).share(index.split.middle))

    report = recall_report(
        index.artifact, ["loudest", "oracle"], [Budget(0.1), Budget(1.0)], MeasuredQueries(index.artifact)
    )
    rows = {(row.method, row.budget): row for row in report.by()}
    assert 0 < rows["loudest", 0.1].recall < 1
    assert rows["loudest", 0.1].attention_mass < rows["oracle", 0.1].attention_mass
    assert rows["loudest", 1.0].output_error < 1e-5


def test_another_parameter_builds_the_toy_anew(tmp_path: Path) -> None:
    plan = with_changes(small_plan(), methods={"loudest": LoudestIndexer()})
    first = build_index(plan, tmp_path / "toy.skv")
    second = build_index(with_changes(plan, methods={"loudest": LoudestIndexer(power=1.0)}), tmp_path / "toy.skv")
    name = layer_file("loudest", 0)
    assert second.files[name].recipe != first.files[name].recipe
    assert second.parent_uuid == first.uuid

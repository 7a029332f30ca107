"""The deed `gauge`: the missed mass that `--gauge` prints is computed again in float64 from rows, choice and
centroids."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.attention.executors import Fetched, GatherExecutor, GatherMaker
from sparsekv.runtime.attention.guard import estimates_missed
from sparsekv.runtime.attention.sparse_layer import appends
from sparsekv.runtime.decoding.answer import Sampling, question_ids
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.session import Session
from sparsekv.runtime.reporting.recall import chosen_positions
from sparsekv.runtime.selection.interface import Budget, MethodSpec, Queries

from .deeds import deed
from .oracles import expect
from .questions import expect_same_steps, fed_with, stepped
from .world import World, files_of, stored_rows

APART = 1e-3
"""Largest difference of missed shares from those in float64; relative for shares above 1."""


@dataclass(frozen=True)
class Found:
    """The tokens that a layer chose for some queries of tokens at `places` [Q].

    `positions` [Hk, Q or 1, R] are positions in the middle, or M for none, with their log weights. `rest` are centroids
    of the other tokens. `exact` [Hk, E, D] are the keys that the queries attend to exactly, of tokens up to `end`.
    """

    query: torch.Tensor
    places: torch.Tensor
    positions: torch.Tensor
    log_weights: torch.Tensor | None
    rest: tuple[Any, ...]
    exact: torch.Tensor
    end: int


class Recorder(GatherExecutor):
    """Executor that gathers as usual, and passes its choices to a function."""

    def __init__(self, *layer: Any, keep: Any, **options: Any):
        super().__init__(*layer, **options)
        self.keep = keep

    def find(self, queries: Queries, budget: Budget) -> Fetched:
        selection = self.select(queries, budget)
        fetched = self.fetch(selection, queries.query.device)
        positions = chosen_positions(selection.rows, self.selector.layout, self.middle.used)
        self.keep(queries.query, queries.positions().cpu(), positions, selection.rows.log_weights, fetched.rest)
        return fetched


class Gauged:
    """A session that measures the missed share, and the choices of its layers so far."""

    def __init__(self, world: World, index: OpenIndex):
        self.found: dict[int, list[Found]] = {}
        config = replace(world.config(index, guard=None, ahead=False), gauge=True)

        def maker(layer: int) -> GatherMaker:
            return partial(Recorder, keep=partial(self._keep, layer))

        self.asker = Session.open(index, config, gather_makers=maker)

    def _keep(self, layer: int, query: torch.Tensor, *found: Any) -> None:
        stored = self.asker.cache.by_number[layer]
        self.found.setdefault(layer, []).append(Found(query, *found, stored.exact_rows()[0], stored.get_seq_length()))


def missed(
    one: Found, middle: torch.Tensor, facts: Any, sinks: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Compute the share [Hk, G, Q] float64 of all attention that the centroids of the rest get.

    Args:
        middle: the keys [Hk, M, D] that may be chosen.
        bias: [Hk, C], by which a method changes the log weights of its clusters.
    """

    def logits(keys: torch.Tensor) -> torch.Tensor:
        plain = torch.einsum("hgqd,htd->hgqt", one.query.double().cpu(), keys.double().cpu()) * facts.softmax_scale
        return plain if facts.softcap is None else facts.softcap * (plain / facts.softcap).tanh()

    heads, queries, tokens = len(middle), one.query.shape[2], middle.shape[1]
    of_middle = torch.cat([logits(middle), torch.full((*one.query.shape[:3], 1), -math.inf, dtype=torch.float64)], -1)
    positions = one.positions.cpu().expand(heads, queries, -1)
    chosen = of_middle.gather(-1, positions[:, None].expand(*one.query.shape[:3], -1))
    if one.log_weights is not None:
        chosen = chosen + one.log_weights.double().cpu()
    exact = logits(one.exact)
    seen = torch.arange(exact.shape[-1]) < exact.shape[-1] - (one.end - 1 - one.places)[:, None]
    attended = torch.cat([chosen, exact.masked_fill(~seen, -math.inf)], -1).logsumexp(-1)
    if sinks is not None:
        attended = torch.logaddexp(attended, sinks.double().cpu().view(heads, -1, 1))
    if not one.rest:
        return torch.full_like(attended, math.nan)
    left = torch.cat([logits(part.keys) + part.log_counts.double().cpu()[:, None] for part in one.rest], -1)
    stand_for = sum(_tokens(part, bias) for part in one.rest)
    taken = (positions < tokens).sum(-1)
    apart = float((stand_for + taken - tokens).abs().max())
    if one.log_weights is None:
        expect(apart <= 1e-3 * tokens, "rest", f"centroids stand for {stand_for.tolist()} beside {taken.tolist()}")
    return 1 / (1 + (attended - left.logsumexp(-1)).exp())


def _tokens(part: Any, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the number [Hk, Q or 1] of tokens that a set of centroids represents."""
    log_counts = part.log_counts.double().cpu()
    if bias is not None:
        more = bias if part.clusters is None else bias.gather(-1, part.clusters.long().cpu())
        log_counts = log_counts - more[:, None]
    return log_counts.exp().sum(-1)


@deed("gauge", 4)
def gauge(world: World, index: OpenIndex) -> None:
    """Check that the missed share of each layer is the softmax's share of the rest, and that measuring changes no
    answer."""
    case = world.case
    asked = question_ids(index, world.question(0), raw=case.raw)
    form = world.config(index, guard=None, ahead=False).attention
    assert isinstance(form, MethodSpec)
    if not estimates_missed(form.method, residual=form.residual):
        try:
            Gauged(world, index)
        except UsageError as error:
            expect("cannot estimate how much attention it misses" in str(error), "gauge refused", str(error))
        else:
            expect(False, "gauge", f"{case.method} has no centroids of what it leaves, and is measured")
        return
    gauged, plainly = Gauged(world, index), world.asker(index, guard=None, ahead=False)
    if appends(gauged.asker.cache.stored_layers):
        return
    gauged.found.clear()
    answer = gauged.asker.ask(asked, Sampling(case.answer))
    stored, sinks = stored_rows(world.folder / "index.skv", case.layers), world.sinks("index.skv")
    files = files_of(world.folder / "index.skv")
    first, end = index.split.sinks, index.split.sinks + index.split.middle
    layers = index.artifact.manifest.layers
    for layer, stats in gauged.asker.cache.by_number.items():
        told = stats.missed()
        if (told is None) != (layer not in gauged.found):
            expect(False, "gauge", f"of layer {layer}: {told}, and {len(gauged.found.get(layer, ()))} choices")
        if told is None:
            continue
        middle = stored[layer][0][:, first:end]
        bias = files.get(f"{case.method}/layer_{layer:03d}.safetensors", {}).get("rest_bias")
        shares = [missed(one, middle, layers[layer], sinks[layer], bias) for one in gauged.found[layer]]
        expected = float(torch.cat([share.mean(1).flatten() for share in shares]).mean())
        right = abs(told[0] - expected) <= APART or (math.isnan(told[0]) and math.isnan(expected))
        expect(right, "gauge", f"of layer {layer}: {told[0]}, and {expected} in float64")
        expect(not told[1] and not told[2], "gauge", f"of layer {layer} raised a budget: {told}")
    fed = fed_with(asked, answer.ids)
    found, told = stepped(index, gauged.asker, fed, len(asked)), "those of an answer that is not measured"
    expect_same_steps(found, world, index, plainly, fed, len(asked), "gauged logits", told)

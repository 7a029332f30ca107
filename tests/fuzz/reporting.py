"""Deeds that compute printed numbers again in float64 from the safetensors files."""

import json
from random import Random
from unittest import mock

import torch

from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.reporting.recall import MeasuredQueries
from sparsekv.runtime.reporting.report import GROUPS, recall_report
from sparsekv.runtime.selection.interface import Budget, MethodSpec
from sparsekv.runtime.selection.registry import methods_of
from sparsekv.runtime.sources.places import Places

from .deeds import deed
from .oracles import expect
from .questions import NEVER_EVERYTHING
from .world import World, files_of, stored_rows

APART = 1e-3
"""Largest difference of shares and of errors, which are of the order of 1, from those in float64."""
FAINT = 1e-30
"""Probability, or norm of an output, below which float32 does not distinguish values. Learned sinks can leave so little
attention to the tokens."""


class Truth:
    """One layer's dense attention of the held-out or calibration queries, in float64, from files alone."""

    def __init__(self, world: World, layer: int, *, calibration: bool = False):
        folder = world.folder / "index.skv"
        manifest = json.loads((folder / "manifest.json").read_text())
        facts, split = manifest["layers"][layer], manifest["split"]
        stored = files_of(folder)[f"queries/layer_{layer:03d}.safetensors"]
        keys, values = (rows.double() for rows in stored_rows(folder, world.case.layers)[layer])
        half, tail = split["tail"] // 2, split["tail"]
        first, end = (0, half) if calibration else (half, tail)
        queries = stored["tail"][:, first:end].double().unflatten(0, (len(keys), -1))  # [Hk, G, Q, D]
        logits = torch.einsum("hgqd,htd->hgqt", queries, keys) * facts["softmax_scale"]
        if facts["softcap"] is not None:
            logits = facts["softcap"] * (logits / facts["softcap"]).tanh()
        tokens = keys.shape[1]
        seen = torch.arange(tokens) <= torch.arange(tokens - tail + first, tokens - tail + end)[:, None]
        self.logits = logits.masked_fill(~seen, -torch.inf)
        self.values, self.sinks = values, stored.get("sink_logits")
        self.middle = slice(split["sinks"], split["sinks"] + split["middle"])
        self.probability = self.weights(torch.ones(tokens, dtype=torch.bool))[..., self.middle].mean(1)  # [Hk, Q, M]
        self.output = self.of(torch.ones(tokens, dtype=torch.bool))

    def weights(self, attended: torch.Tensor) -> torch.Tensor:
        logits = self.logits.masked_fill(~attended, -torch.inf)
        if self.sinks is None:
            return logits.softmax(-1)
        beside = self.sinks.double().view(len(logits), -1, 1, 1).expand(*logits.shape[:3], 1)
        return torch.cat([logits, beside], -1).softmax(-1)[..., :-1]

    def of(self, attended: torch.Tensor) -> torch.Tensor:
        return torch.einsum("hgqt,htd->hgqd", self.weights(attended), self.values)

    def measured(self, chosen: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the means [Hk] of the measures of a choice [Hk, Q, M]; NaN for shares of next to nothing."""
        attended = torch.ones(chosen.shape[0], 1, chosen.shape[1], self.logits.shape[-1], dtype=torch.bool)
        attended[..., self.middle] = chosen[:, None]
        whole, kept = self.probability.sum(-1), (self.probability * chosen).sum(-1)
        size = self.output.norm(dim=-1)
        apart = (self.of(attended) - self.output).norm(dim=-1) / size.where(size > FAINT, torch.nan)
        return {
            "attention_mass": (kept / whole.where(whole > FAINT, torch.nan)).mean(1),
            "missed_mass": (whole - kept).mean(1),
            "output_error": apart.mean((1, 2)),
            "selected_tokens": chosen.double().sum(-1).mean(1),
        }

    def ties(self, tokens: int, head: int) -> bool:
        """Whether rounding decides the `tokens` likeliest tokens, for one of a head's queries."""
        if tokens >= self.probability.shape[-1]:
            return False
        best = self.probability[head].topk(tokens + 1, -1).values
        return bool((best[..., -2] - best[..., -1] <= 1e-4 * best[..., -2] + FAINT).any())


@deed("lines", 2, asks=False)
def lines(world: World, index: OpenIndex) -> None:
    """Check that a source is in the lines of the document that it names."""
    random, tokens = Random(world.case.more), index.split.tokens
    places, of_document = Places(index.artifact, world.tokenizer), world.document.split("\n")
    for token in random.sample(range(tokens), min(5, tokens)):
        shares = torch.zeros(tokens)
        shares[token] = 1
        for source in places.sources(shares, 1):
            first, last = source.lines
            known = "\n".join(of_document[max(0, first - 1) : last])
            # A source may begin or end inside a character of several bytes.
            expect(source.text.strip("\ufffd") in known, "a source's lines", f"{source} is not in {known!r}")


@deed("report", 5)
def report(world: World, index: OpenIndex) -> None:
    """Check a recall report of the oracle and of the window against their definitions, and that everything loses
    nothing."""
    random = Random(world.case.more)
    budgets = [Budget(1.0), Budget(1), Budget.parse(f"{random.randint(2, 99)}%")]
    names = [name for name in methods_of(index.artifact) if name in (world.case.method, "oracle", "window")]
    found = recall_report(index.artifact, names, budgets, MeasuredQueries(index.artifact), device=index.device)
    expect(all(str(one) != "nan" for row in found.rows for one in vars(row).values()), "report", "has a NaN")
    heads = sum(index.artifact.heads_and_channels(layer)[0] for layer in index.artifact.manifest.indexed_layers)
    for name, variant in {(row.method, row.variant) for row in found.rows}:
        rows = sum((row.method, row.variant) == (name, variant) for row in found.rows)
        expect(rows == len(budgets) * heads, "report's budgets", f"{rows} rows of {name} {variant} at {budgets}")
    truths = {layer: Truth(world, layer) for layer in index.artifact.manifest.indexed_layers}
    for row in found.rows:
        truth, head, told = truths[row.layer], row.kv_head, f"{row.name} at {row.budget} of layer {row.layer}"
        tokens = row.budget_tokens
        if row.method in ("oracle", "window"):
            best = truth.probability.topk(tokens, -1).indices
            chosen = torch.zeros_like(truth.probability, dtype=torch.bool)
            if row.method == "oracle":
                chosen.scatter_(-1, best, True)
            # Of equal tokens, which a layer without positions has, the report's oracle may choose others than ours.
            tied = row.method == "oracle" and truth.ties(tokens, head)
            for name, of_heads in {} if tied else truth.measured(chosen).items():
                expected = float(of_heads[head])
                apart = abs(getattr(row, name) - expected)
                expect(
                    expected != expected or apart <= APART * max(1, abs(expected)),
                    "report",
                    f"{name} of {told} is {apart:.2e} off",
                )
            # Of equal tokens, which a layer without positions has, the report's oracle may choose others than ours.
            tied = row.method == "oracle" and tokens and truth.ties(tokens, head)
            right = tied or abs(row.recall - float(row.method == "oracle")) <= APART
            expect(right, "report", f"recall of {told}: {row.recall}")
        elif tokens == truth.probability.shape[-1] and row.method not in NEVER_EVERYTHING:
            exact = abs(row.attention_mass - 1) + row.output_error + abs(row.recall - 1)
            expect(exact <= 3 * APART, "report of everything", f"{told}: {row}")
    for names_of in (GROUPS, GROUPS[:1], ()):
        means = found.by(*names_of)
        for name in ("recall", "output_error", "kv_fraction"):
            both = [sum(getattr(row, name) for row in rows) / len(rows) for rows in (means, found.rows)]
            expect(
                abs(both[0] - both[1]) <= APART * max(1, both[1]), "report", f"means of {name} by {names_of}: {both}"
            )


@deed("report in batches", 1, asks=False)
def report_in_batches(world: World, index: OpenIndex) -> None:
    """Check that a report that measures few queries at once, as of a long document, equals one that measures all at
    once."""
    case, random = world.case, Random(world.case.more)
    config = world.config(index, guard=None, residual=False, question_prefill=None, prefill_budget=None)
    form, few = config.attention, random.choice([1, 3, 5])
    assert isinstance(form, MethodSpec)
    heads = max(len(index.artifact.queries(layer)["tail"]) for layer in index.artifact.manifest.indexed_layers)
    queries, configured = MeasuredQueries(index.artifact), {case.method: ("", form.method)}
    found = []
    for most in (2**26, few * heads * index.split.tokens):
        with mock.patch("sparsekv.runtime.reporting.recall.LOGITS_AT_ONCE", most):
            asked = index.artifact, [case.method], [config.budget], queries
            found.append(recall_report(*asked, configured=configured, device=index.device).rows)
    for whole, row in zip(*found, strict=True):
        # Among tokens of equal score, a method may choose others if a query is alone.
        for name in ("selected_tokens", "kv_fraction"):
            expected, told = getattr(whole, name), getattr(row, name)
            right = abs(told - expected) <= 2 * APART * max(1, abs(expected))
            expect(right, "report in batches", f"{name} of {form}, {few} at once: {told}, not {expected}")

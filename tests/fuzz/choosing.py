"""The deed `choices`: each choice of a method is compared with the method's own estimates in float64.

On a GPU the kernels run; elsewhere the plain-torch functions that define them run, for documents of any length. So a
definition that confuses good tokens with bad ones is found, even if its kernel agrees with it.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random

import torch
from torch.nn.functional import normalize

from sparsekv.formats.index.schema import LayerFacts
from sparsekv.kernels.attention.cpu_steps import LARGEST_EXPONENT, attend_to_best, choose_by_codes
from sparsekv.kernels.clusters.cluster_choice import EXPONENT_BITS, Children, choose_listed, open_clusters
from sparsekv.kernels.codes.code_ranks import HEADROOM, IN_WORD, LEVELS
from sparsekv.kernels.kmeans.kmeans import nearest_centres
from sparsekv.kernels.posting_lists.list_ranks import LARGEST, ExactKeys
from sparsekv.kernels.posting_lists.posting_lists import HIGHEST, ListCodes, cosines, unpacked
from sparsekv.kernels.scores.quoka import directions, far_directions, nearest_keys
from sparsekv.runtime.cache.kv_store import LayerRows
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.prepare import prepare_layer
from sparsekv.runtime.methods.codes import CodeScan, CodesSelector, QuestionScan
from sparsekv.runtime.methods.csattention import ListSearch, TableSelector
from sparsekv.runtime.selection.clusters.selector import ClusterMethod, ClusterSelector
from sparsekv.runtime.selection.interface import Budget, MethodSpec, Queries, Selector, methods
from sparsekv.runtime.selection.wrappers import chosen_rows, unite

from .case import Case, from_options
from .deeds import deed
from .oracles import expect
from .world import World

LEAST = 0.97
"""Least share of the best tokens' probability that chosen tokens must have, apart from the loss by the precision of
ranks."""
QUERIES = 3
"""Number of the tail's queries that choose."""
OCTAVE = math.log(2)
SMALLEST = -80.0
"""Logarithm of a probability below which probabilities are equal in float32."""
EXACTLY, BY_SCORE, BY_EXPONENT, BY_FEW_RANKS = 0.01, OCTAVE / 64, OCTAVE, OCTAVE / 2
"""Difference in nats within which either of two tokens may be chosen: by float32 scores, by ranks with fraction bits,
by exponents, and by few ranks."""


@dataclass(frozen=True)
class Layer:
    """A layer that chooses `tokens` of the middle's keys [Hk, M, D] for queries [Hk, G, T, D] at positions [T].

    `exact` has the other keys [Hk, E, D] and the sinks [Hk, G]. `beside` [Hk, G, T] is the log-sum-exp of their logits.
    """

    facts: LayerFacts
    keys: torch.Tensor
    query: torch.Tensor
    positions: torch.Tensor
    exact: ExactKeys
    beside: torch.Tensor
    tokens: int

    def logits(self, query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Compute the logits [Hk, G, T, N] float64 of queries [Hk, G, T, D] for keys [Hk, N, D]."""
        return self.of_products(torch.einsum("hgtd,hnd->hgtn", query.double(), keys.double()))

    def of_products(self, products: torch.Tensor) -> torch.Tensor:
        logits, softcap = products * self.facts.softmax_scale, self.facts.softcap
        return logits if softcap is None else softcap * (logits / softcap).tanh()


@dataclass(frozen=True)
class Choice:
    """A choice of the best `tokens` by estimates [Hk, M], which are logarithms of probabilities in float64.

    `held` [Hk] is the logarithm of the chosen tokens' total probability. `unclear` [Hk] is the difference in nats
    within which either of two tokens may be chosen.
    """

    by: str
    estimates: torch.Tensor
    held: torch.Tensor
    tokens: int
    unclear: torch.Tensor | float

    def kept(self) -> float:
        """Return the least share, over heads, of the probability of the worst choice that is still right."""
        best = self.estimates.topk(self.tokens).values
        last = best[:, -1:]
        unclear = torch.as_tensor(self.unclear).to(best).expand(len(best))[:, None]
        worst = torch.where(best > last + unclear, best, last - unclear).logsumexp(-1)
        return float((self.held - worst).exp().min())


Ways = Iterator[Choice]


def held_by(estimates: torch.Tensor, rows: torch.Tensor, used: torch.Tensor | None = None) -> torch.Tensor:
    """Return the total log-probability [Hk] of rows [Hk, K], or of the first `used` [Hk] of them; a row counts once."""
    none = estimates.shape[1]
    if used is not None:
        rows = torch.where(torch.arange(rows.shape[1], device=rows.device) < used[:, None], rows, none)
    chosen = torch.zeros(len(rows), none + 1, dtype=torch.bool, device=rows.device).scatter_(1, rows.long(), True)
    return estimates.masked_fill(~chosen[:, :none], -torch.inf).logsumexp(-1)


def averaged(logits: torch.Tensor, totals: torch.Tensor, most: float = math.inf) -> torch.Tensor:
    """Return the log-probabilities [Hk, T, N] of logits [Hk, G, T, N], clamped to `most`, and averaged over query
    heads."""
    return (logits - totals[..., None]).clamp(max=most).logsumexp(1) - math.log(logits.shape[1])


def jointly(estimates: torch.Tensor) -> torch.Tensor:
    """Average log-probabilities [Hk, T, N] over queries; return [Hk, N]."""
    return estimates.logsumexp(1) - math.log(estimates.shape[1])


def in_ranks(estimates: torch.Tensor, wanted: int, octaves: int = 2**EXPONENT_BITS) -> torch.Tensor:
    """Clamp estimates to the range that ranks distinguish: from probability 1 / `wanted` down by `octaves` octaves."""
    highest = -OCTAVE * (max(1, wanted).bit_length() - 1)
    return estimates.clamp(highest - OCTAVE * octaves, highest)


def reranked(logits: torch.Tensor, totals: torch.Tensor, wanted: int) -> torch.Tensor:
    """Return estimates [Hk, T, N] of all keys from exact logits [Hk, G, T, N] and estimated log-sum-exps [Hk, G, T]."""
    own = logits.logsumexp(-1)
    totals = torch.maximum(totals, own)
    return in_ranks(averaged(logits, totals - (totals - own).amin(1, keepdim=True)), wanted)


def by_codes(selector: Selector, layer: Layer) -> Ways:
    """Yield choices by product codes, with log-sum-exps that the clusters estimate, and with exact ones.

    Estimated log-sum-exps may be so small that many keys have the highest rank; any choice among these keys is right.
    """
    assert isinstance(selector, CodesSelector)
    (query, tokens), tensors, books = (layer.query, layer.tokens), selector.tensors, selector.estimates.codebooks
    turned = (query.double() @ tensors["query_turn"].double()[:, None]).unflatten(-1, (books.shape[1], -1))
    products = torch.einsum("hgtpd,hpcd->hgtpc", turned, books.double())
    names = selector.codes.transpose(1, 2)[:, None, None].long().expand(*products.shape[:4], -1)
    logits = layer.of_products(products.gather(-1, names).sum(3))
    weighed = layer.logits(query, selector.clusters.keys) + selector.log_masses.double()[:, None, None]
    totals = torch.logaddexp(weighed.logsumexp(-1), layer.beside.double())
    right = torch.logaddexp(logits.logsumexp(-1), layer.beside.double())
    exactly = averaged(logits, totals, LARGEST_EXPONENT).clamp(min=SMALLEST)
    for t, one in enumerate(query.unbind(2)):
        if not query.is_cuda:
            chosen = choose_by_codes(one, selector.step_codes, layer.beside[..., t], tokens)
            yield Choice("the compiled step", exactly[:, t], held_by(exactly[:, t], chosen), tokens, EXACTLY)
    if not (CodeScan.fits(tensors) if query.is_cuda else books.shape[1] % IN_WORD == 0):
        return
    spans = books.double().amax(2) - books.double().amin(2)
    steps = (turned.abs() * spans[:, None, None]).sum(-1).amax(-1) * layer.facts.softmax_scale / LEVELS
    # Rounding a part's product to a step moves a key by sqrt(1 / 12) steps. Among the keys of thousands of cases, some
    # are moved by more than three standard deviations of the sum.
    unclear = (BY_FEW_RANKS + 5 * steps * math.sqrt(books.shape[1] / 12)).amax(1)
    scan, unweighed = selector.gpu_scan, CodeScan(tensors, selector.clusters, layer.facts)
    unweighed.clusters = replace(scan.clusters, bias=torch.full_like(scan.clusters.bias, -torch.inf))
    by_clusters, rightly = in_ranks(averaged(logits, totals), tokens >> HEADROOM), averaged(logits, right)
    again = reranked(layer.logits(query, layer.keys), totals, tokens)
    for t, one in enumerate(query.unbind(2)):
        chosen, _ = scan.choose(one, layer.exact, None, None, tokens, tokens)
        yield Choice("the scan", by_clusters[:, t], held_by(by_clusters[:, t], chosen), tokens, unclear[:, t])
        chosen, _ = scan.choose(one, layer.exact, None, layer.keys, tokens, layer.keys.shape[1])
        yield Choice("the reranked scan", again[:, t], held_by(again[:, t], chosen), tokens, OCTAVE / 8)
        exact = ExactKeys(layer.exact.keys[:, :0], sinks=right[..., t].float())
        chosen, _ = unweighed.choose(one, exact, None, None, tokens, tokens)
        ranked = in_ranks(rightly[:, t], tokens >> HEADROOM)
        yield Choice("the scan's ranks", ranked, held_by(ranked, chosen), tokens, unclear[:, t])
    union, _ = unweighed.choose_for_each(query, right.float(), tokens)
    for t in range(query.shape[2]):
        ranked = in_ranks(rightly[:, t], tokens >> HEADROOM)
        yield Choice("the scans", ranked, held_by(ranked, union.rows, union.used), tokens, unclear[:, t])
    if not query.is_cuda or QuestionScan.fits(tensors):
        ranked = in_ranks(jointly(rightly), tokens >> HEADROOM)
        chosen = QuestionScan(tensors, layer.facts).choose(query, right.float(), tokens)
        yield Choice("the scan of a question", ranked, held_by(ranked, chosen), tokens, OCTAVE / 8)


def by_lists(selector: Selector, layer: Layer) -> Ways:
    """Yield choices by posting lists in four bits, and by exact logits of all keys."""
    assert isinstance(selector, TableSelector)
    asked = Queries(layer.query, lambda: layer.positions, lambda: layer.beside, joint=False)
    told = f"of the lists that are read with backoff {selector.backoff}"
    expect(torch.equal(selector.covered(asked), in_lists_read(selector, layer.query)), "covered tokens", told)
    if selector.backoff is not None:
        return
    query, tokens, keys = layer.query, layer.tokens, layer.keys
    search = ListSearch(selector.tables, selector.scoring, selector.weights, layer.facts)
    products, reach = listed_products(query, search.lists)
    logits, exact = layer.of_products(products), layer.logits(query, keys)
    totals = torch.logaddexp(logits.logsumexp(-1), layer.beside.double())
    estimates = in_ranks(averaged(logits, totals), tokens)
    # Slopes of lists are rounded to fractions of their sum; `rounding` bounds the error.
    parts = search.lists.codes.shape[1]
    rounding = 3 * math.sqrt(parts / 12) * HIGHEST / (HIGHEST * (LARGEST // HIGHEST - parts))
    unclear = (OCTAVE / 4 + rounding * reach * layer.facts.softmax_scale).amax(1)
    for t, one in enumerate(query.unbind(2)):
        chosen = search.select(one, layer.exact, keys, tokens).rows.starts[:, 0]
        yield Choice("the lists", estimates[:, t], held_by(estimates[:, t], chosen), tokens, unclear[:, t])
        again = search.select(one, layer.exact, keys, tokens, keys.shape[1] / tokens).rows.starts[:, 0]
        ranked = reranked(exact, totals, tokens)[:, t]
        # The estimated log-sum-exps, which weight the query heads, come from the rounded slopes.
        yield Choice("the reranked lists", ranked, held_by(ranked, again), tokens, unclear[:, t])


def in_lists_read(selector: TableSelector, query: torch.Tensor) -> torch.Tensor:
    """Return a mask [Hk, T, M] of the tokens in the lists that queries [Hk, G, T, D] read; with backoff, in two
    lists."""
    tables, backoff, (_, G, T, _) = selector.tables, selector.backoff, query.shape
    near = cosines(tables, query.transpose(1, 2).flatten(1, 2))
    best = near.topk(1 if backoff is None else min(2, near.shape[-1]), -1)
    reads = torch.zeros_like(near).scatter_(-1, best.indices[..., :1], 1.0)
    if backoff is not None:
        reads.scatter_(-1, best.indices[..., 1:], (best.values[..., :1] < backoff).float())
    lists = near.new_zeros(*tables.tokens.shape[:3], tables.keys)
    lists.scatter_(-1, tables.tokens.long() - tables.first_token, 1.0)
    return (torch.einsum("hmrc,hmcn->hrn", reads, lists) > 0).unflatten(1, (T, G)).any(2)


def listed_products(query: torch.Tensor, lists: ListCodes) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the products [Hk, G, T, M] float64 that the lists' codes represent, and the error [Hk, G, T] that codes
    may cause."""
    codes = unpacked(lists.codes)[..., : lists.keys].double()
    products = query.new_zeros(*query.shape[:3], lists.keys, dtype=torch.float64)
    reach, head = products[..., 0].clone(), torch.arange(len(query), device=query.device)[:, None, None]
    for part, channels in enumerate(lists.channels.long()):
        along = torch.einsum("hgtd,hcd->hgtc", query[..., channels].double(), lists.centroids[:, part].double())
        longest, nearest = along.max(-1)
        weight = lists.weights[:, part, None, None].double() * (longest.clamp(min=0) if lists.reaching else 1)
        slope, origin = (weight * of.double()[head, part, nearest] for of in (lists.steps, lists.origins))
        products += origin[..., None] + slope[..., None] * codes[head, part, nearest]
        reach += HIGHEST * slope.abs()
    return products, reach


def by_reranking(form: MethodSpec, rows: LayerRows, layer: Layer) -> Ways:
    """Yield choices by exact logits of all keys, each of which is a candidate; with one query head no estimate
    matters."""
    if not hasattr(form.method, "rerank") or form.method.cycle() > 1 or layer.query.shape[1] > 1:
        return
    every = replace(form, method=replace(form.method, rerank=layer.keys.shape[1] / layer.tokens))
    selector = prepare_layer(rows, every, layer.keys.device).selector
    chosen = selector.select(
        Queries(layer.query, lambda: layer.positions, lambda: layer.beside, joint=False), Budget(layer.tokens)
    )
    estimates, places = layer.logits(layer.query, layer.keys)[:, 0], chosen.rows.expand()[0]
    for t in range(layer.query.shape[2]):
        exactly = estimates[:, t]
        yield Choice("exact logits of all keys", exactly, held_by(exactly, places[:, t]), layer.tokens, EXACTLY)


def by_clusters(selector: Selector, layer: Layer) -> Ways:
    """Yield choices by centroids of clusters, whose rows are in the layout's order."""
    assert isinstance(selector, ClusterSelector)
    query, tokens, steps, tree = layer.query, layer.tokens, selector.steps, selector.tree
    if selector.windowed_rope is not None:
        asked = Queries(query, lambda: layer.positions, lambda: layer.beside, joint=False)
        query = selector.windowed_rope.query(asked)
    places = torch.arange(selector.middle, device=query.device).expand(len(query), -1).contiguous()
    labels = torch.searchsorted(selector.starts, places, right=True) - 1

    def scores(level: int) -> torch.Tensor:
        logits, counts = layer.logits(query, tree.centroids[level]), tree.counts[level].double()
        logits = logits.masked_fill(counts[:, None, None] == 0, -torch.inf)
        return averaged(logits, (logits + counts.log()[:, None, None]).logsumexp(-1))

    fine = scores(0)
    exactly = fine.gather(-1, labels[:, None].expand(-1, query.shape[2], -1))
    estimates = in_ranks(exactly, tokens)
    for t in range(query.shape[2]):
        one = query[:, :, t : t + 1]
        indices = steps.flat(one, tokens).rows.indices
        assert indices is not None
        held = held_by(estimates[:, t], indices.rows, indices.used)
        yield Choice("clusters", estimates[:, t], held, tokens, BY_SCORE)
        if not query.is_cuda:
            rows = steps.best(one, tokens).rows.expand()[0][:, 0]
            yield Choice("torch's clusters", exactly[:, t], held_by(exactly[:, t], rows), tokens, EXACTLY)
            held = attended(selector, one[:, :, 0], exactly[:, t], tokens)
            yield Choice("the compiled step", exactly[:, t], held, tokens, EXACTLY)
    ends = torch.arange(1, query.shape[2] + 1, dtype=torch.int32, device=query.device)
    indices = steps.together(query, ends, tokens, selector.middle, None, None).rows.indices
    assert indices is not None
    for t in range(query.shape[2]):
        held = held_by(estimates[:, t], indices.rows, indices.used)
        yield Choice("clusters of several", estimates[:, t], held, tokens, BY_SCORE)
    indices = steps.together(query, ends[-1:], tokens, selector.middle, None, None).rows.indices
    assert indices is not None
    ranked = in_ranks(jointly(exactly), tokens)
    yield Choice("clusters of a question", ranked, held_by(ranked, indices.rows, indices.used), tokens, BY_SCORE)
    if steps.below is not None:
        yield from _in_two_levels(selector, layer, query, scores(1), labels)


def attended(selector: ClusterSelector, query: torch.Tensor, estimates: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the total log-probability [Hk] of the rows that the compiled step chooses.

    The step attends to keys of zeros, which have equal weights, and to values that are the rows' probabilities.
    """
    Hk, _, D = query.shape
    most = estimates.amax(-1, keepdim=True)
    keys, values = torch.zeros(2, Hk, selector.middle, D)
    values[..., 0] = (estimates - most).exp()
    nothing = keys[:, :0], values[:, :0]
    mean = attend_to_best(query, selector.fused, (keys, values), nothing, tokens, replace=False)[:, 0, 0]
    return (mean.double() * tokens).log() + most[:, 0]


def _in_two_levels(
    selector: ClusterSelector, layer: Layer, query: torch.Tensor, coarse: torch.Tensor, labels: torch.Tensor
) -> Ways:
    """Yield choices down a hierarchy: coarse clusters that are opened, by estimates [Hk, T, C], and their best
    children."""
    steps, tokens, tree = selector.steps, layer.tokens, selector.tree
    assert steps.below is not None
    slots = tree.counts[0].shape[1]
    children, scaling = Children(*steps.below, slots), layer.facts.scaling
    for t, one in enumerate(query.unbind(2)):
        opened = open_clusters(one, tree.centroids[1], tree.counts[1], children, slots // 2, tokens, *scaling)
        is_open, ranked = opened.lengths > 0, in_ranks(coarse[:, t], tokens, 2**EXPONENT_BITS - 2)
        is_shut = ~is_open & (steps.below[0] > 0) & (tree.counts[1] > 0)
        worst = ranked.masked_fill(~is_open, torch.inf).amin(-1)
        beyond = ranked.masked_fill(~is_shut, -torch.inf).amax(-1) - worst
        expect(float(beyond.max()) <= BY_EXPONENT + EXACTLY, "choice of opened clusters", f"one {beyond} nats better")
        below = opened.rows, opened.used
        listed = choose_listed(one, tree.centroids[0], tree.counts[0], steps.first_row, below, tokens, *scaling)
        is_listed = torch.zeros(len(one), slots + 1, dtype=torch.bool, device=one.device)
        inside = torch.arange(below[0].shape[1], device=one.device) < below[1][:, None]
        is_listed.scatter_(1, torch.where(inside, below[0], slots).long(), True)
        counts = tree.counts[0].double() * is_listed[:, :slots]
        logits = layer.logits(one[:, :, None], tree.centroids[0]).masked_fill(counts[:, None, None] == 0, -torch.inf)
        scores = averaged(logits, (logits + counts.log()[:, None, None]).logsumexp(-1))[:, 0]
        estimates = in_ranks(scores, tokens).masked_fill(counts == 0, -torch.inf).gather(1, labels)
        held = held_by(estimates, listed.chosen.rows, listed.chosen.used)
        yield Choice("clusters down a hierarchy", estimates, held, tokens, BY_SCORE)


def by_directions(layer: Layer) -> None:
    """Check the keys and queries that QuoKA's prefill chooses by cosines, and the centres that are nearest to keys."""
    keys, query, count = layer.keys, layer.query[:, :1], min(layer.tokens, layer.keys.shape[1])
    some = directions(query)
    cosines = torch.einsum("hqd,hnd->hqn", some.double(), normalize(keys.double(), dim=-1)).amax(1)
    chosen = cosines.gather(1, nearest_keys(some, keys, count)).amin(-1)
    short = float((cosines.topk(count).values[:, -1] - chosen).max())
    expect(short <= 2**-14, "choice of keys by cosine", f"one is {short} below the best")
    if (few := query.shape[2] // 2) > 0:
        every, far = normalize(query[:, 0].double(), dim=-1), far_directions(query, few).double()
        likeness = torch.cosine_similarity(query[:, 0].double(), query[:, 0].double().mean(1, keepdim=True), dim=-1)
        taken = likeness.gather(1, (far @ every.transpose(1, 2)).argmax(-1)).amax(-1)
        near = float((taken - likeness.topk(few, largest=False).values[:, -1]).max())
        expect(near <= 1e-4, "choice of queries", f"one is {near} nearer to the mean than those left")
    centres = keys[:, :: max(1, keys.shape[1] // 20)].float().contiguous()
    away = torch.cdist(keys.double(), centres.double(), compute_mode="donot_use_mm_for_euclid_dist").square()
    found = away.gather(-1, nearest_centres(keys.float(), centres.shape[1])(centres)[..., None]).mean((1, 2))
    most = 1.01 * away.amin(-1).mean(1) + 1e-6 * away.mean((1, 2))
    expect(bool((found <= most).all()), "choice of centres", f"at {found}, of which the nearest are at {most}")


CHOOSERS: dict[type[Selector], Callable[[Selector, Layer], Ways]] = {
    CodesSelector: by_codes,
    TableSelector: by_lists,
    ClusterSelector: by_clusters,
}
"""Functions that yield the choices of each kind of selector that has kernels."""


def budget_of(case: Case, middle: int) -> int:
    """Return the case's budget in tokens, or a smaller one if that budget leaves little to choose."""
    tokens = case.budget_in(middle).tokens(middle)
    return tokens if tokens <= middle // 2 else Random(case.more).randint(1, max(1, middle // 3))


def asked_layer(world: World, index: OpenIndex, number: int) -> Layer:
    """Return a layer with the last queries of the tail, as the index stores them."""
    device, split, facts = world.model.device, index.split, index.artifact.manifest.attending[number]
    rows, stored = LayerRows(index.artifact, number).on(device)[0], index.artifact.queries(number)
    end = split.sinks + split.middle
    query = stored["tail"][:, -QUERIES:].to(device).unflatten(0, (len(rows), -1)).to(rows)
    sinks = stored["sink_logits"].to(device).view(len(rows), -1).float() if "sink_logits" in stored else None
    exact = torch.cat([rows[:, : split.sinks], rows[:, end:]], 1).contiguous()
    layer = Layer(
        facts=facts,
        keys=rows[:, split.sinks : end].contiguous(),
        query=query.contiguous(),
        positions=torch.arange(split.tokens - query.shape[2], split.tokens, device=device),
        exact=ExactKeys(exact, sinks=sinks),
        beside=query[..., 0],
        tokens=budget_of(world.case, split.middle),
    )
    beside = layer.logits(query, exact).logsumexp(-1)
    beside = beside if sinks is None else torch.logaddexp(beside, sinks[..., None].double())
    return replace(layer, beside=beside.float())


def expect_union(form: MethodSpec, selector: Selector, layer: Layer) -> None:
    """Check that queries together read the union of their choices, and that one query alone reads its part of the
    union.

    Down a hierarchy, one query reads fewer centroids of the rest than a union.
    """
    if not form.method.can_unite() or selector.append is not None or form.method.cycle() > 1:
        return
    middle, all_of_them = layer.keys.shape[1], slice(None)
    queries = Queries(layer.query, lambda: layer.positions, lambda: layer.beside, joint=False)
    for some in (slice(0, 1), all_of_them):
        own = selector.select(queries.of_tokens(some), Budget(layer.tokens))
        together = unite(own, selector, middle)
        rows = (chosen_rows(one.rows, middle) for one in (own, together))
        expect(torch.equal(*rows), "rows of a union", f"of {form.title}: {together.rows}, not those of {own.rows}")
        if some != all_of_them and len(own.attended_segments()) < 2:
            alone, read = (float(torch.as_tensor(one.cost.index_rows).double().mean()) for one in (own, together))
            right = abs(alone - read) <= 1e-4 * (1 + alone)
            expect(right, "reads of a union", f"of one query, {form.title}: {read} rows of the index, not {alone}")


def expect_as_flat(world: World, form: MethodSpec, selector: Selector, rows: LayerRows, layer: Layer) -> None:
    """Check that a hierarchical lookup that scores all finest clusters, for a large budget, equals a flat lookup."""
    if not isinstance(form.method, ClusterMethod) or form.method.lookup != "hierarchical":
        return
    flat_form = replace(form, method=replace(form.method, lookup="flat"))
    budget = world.case.budget_in(layer.keys.shape[1])
    flat = prepare_layer(rows, flat_form, world.model.device).selector
    for joint in (False, True):
        queries = Queries(layer.query, lambda: layer.positions, lambda: layer.beside, joint=joint)
        found, expected = (one.select(queries, budget) for one in (selector, flat))
        if isinstance(found.cost.index_rows, float):  # down a hierarchy, numbers of read rows differ by query
            same = torch.equal(found.rows.lengths, expected.rows.lengths)
            expect(same, "lookup of a large budget", f"of {form.title} is not the flat one")


def ways_to_choose(world: World, index: OpenIndex) -> Ways:
    """Yield all choices of all indexed layers, for the methods that the index was built for."""
    case = world.case
    for name, _ in case.indexers:
        method = from_options(methods(), name, case.options if name == case.method else ())
        form = MethodSpec(name, "", method)
        for number in index.artifact.manifest.indexed_layers:
            rows = LayerRows(index.artifact, number)
            prepared = prepare_layer(rows, form, world.model.device)
            layer = asked_layer(world, index, number)
            expect_as_flat(world, form, prepared.selector, rows, layer)
            expect_union(form, prepared.selector, layer)
            yield from (replace(one, by=f"{name} by {one.by}") for one in by_reranking(form, rows, layer))
            if (ways := CHOOSERS.get(type(prepared.selector))) is not None:
                yield from (replace(one, by=f"{name} by {one.by}") for one in ways(prepared.selector, layer))


@deed("choices", 8, asks=False)
@torch.inference_mode()
def choices(world: World, index: OpenIndex) -> None:
    """Check that chosen tokens have the probability of the best tokens, by the method's own estimates, even in loud
    models."""
    for number in index.artifact.manifest.indexed_layers:
        by_directions(asked_layer(world, index, number))
    for choice in ways_to_choose(world, index):
        kept = choice.kept()
        told = f"{kept:.3f} of the probability of the {choice.tokens} best tokens"
        expect(kept >= LEAST, f"choice of {choice.by}", told)

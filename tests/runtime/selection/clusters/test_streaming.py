"""Generated tokens join the clusters: which block, which cluster, which row, at what cost, and how to undo it."""

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_tensors import clustered, normal
from support.reference import assert_close, reference_attention
from support.rotation import ROPES, rotated
from support.small_layer import SmallLayer, as_queries, small_layer, sparse_layer

from sparsekv.formats.index.schema import RopeFacts
from sparsekv.kernels.common.hook import AttentionCall
from sparsekv.kernels.kmeans.hierarchy import REFINEMENTS, block_offsets
from sparsekv.runtime.attention.sparse_layer import SparseLayer
from sparsekv.runtime.cache.index_cache import IndexCache
from sparsekv.runtime.methods.multipole import Multipole, WindowedMultipole
from sparsekv.runtime.selection.clusters.selector import ClusterSelector
from sparsekv.runtime.selection.interface import Budget, Selection, Selector

HEADS, GROUP, SIZE, MIDDLE, TAIL = 2, 3, 16, 70, 32
LEVELS = {"flat": (0.25,), "two levels": (0.25, 0.1), "three levels": (0.4, 0.2, 0.1)}
LOOKUPS = {name: "flat" if len(levels) == 1 else "hierarchical" for name, levels in LEVELS.items()}
every_lookup = pytest.mark.parametrize("name", LEVELS)
EVERYTHING = Budget(1.0)
# The new keys and values of every test, of which each takes as many as it needs.
NEW_KEYS, NEW_VALUES = clustered(7, HEADS, 1500, SIZE, 12), normal(8, HEADS, 1500, SIZE)


@dataclass
class Decoding:
    """A sparse layer, and how many new tokens it has seen."""

    layer: SmallLayer
    sparse: SparseLayer
    new: int = 0

    @property
    def selector(self) -> Selector:
        return self.sparse.plan.selector

    @property
    def found(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the selector looks up."""
        assert isinstance(self.selector, ClusterSelector)
        assert self.selector.stream is not None
        return self.selector.stream.found()

    @property
    def middle(self) -> int:
        """Tokens of the middle now."""
        return self.found["token_order"].shape[1]

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values [Hk, N + new, D]."""
        stored = (self.layer.keys, self.layer.values)
        news = (NEW_KEYS[:, : self.new], NEW_VALUES[:, : self.new])
        keys, values = (torch.cat(parts, 1) for parts in zip(stored, news, strict=True))
        return keys, values

    def step(self, tokens: int = 1) -> torch.Tensor:
        """Some more tokens at once; returns what the attention of random queries gives, [Hq, tokens, D]."""
        piece = slice(self.new, self.new + tokens)
        keys, values = NEW_KEYS[:, piece], NEW_VALUES[:, piece]
        self.sparse.update(keys[None], values[None])
        query = normal(self.new, HEADS * GROUP, tokens, SIZE)
        self.new += tokens
        return self.sparse.attend(AttentionCall(0, query, keys, values, 0.2, None, None, None))

    def select(self, budget: Budget) -> Selection:
        """Return the selection for a random query."""
        query = normal(self.new, HEADS, GROUP, 1, SIZE)
        return self.selector.select(as_queries(query), budget)

    def steps(self, pieces: list[int]) -> list[torch.Tensor]:
        return [self.step(tokens) for tokens in pieces]


def _decoding(
    name: str = "flat",
    *,
    block: int = 32,
    buffer: int = 8,
    budget: Budget = EVERYTHING,
    stream: bool = True,
    rope: RopeFacts | None = None,
    outliers: float = 0.0,
) -> Decoding:
    layer = small_layer(middle=MIDDLE, levels=LEVELS[name], outliers=outliers, block=block, rope=rope)
    method = Multipole if rope is None else WindowedMultipole
    selector = method(LOOKUPS[name], stream=stream, buffer=buffer).prepare(layer.context)
    sparse = sparse_layer(layer, selector, budget)
    return Decoding(layer, sparse)


# Pieces of a question and of an answer, the last of them a step of decoding.
pieces = st.lists(st.sampled_from([1, 1, 1, 2, 5, 17, 30]), max_size=9).map(lambda some: [*some, 1])
streams = settings(max_examples=15)
with_streams = given(
    pieces=pieces,
    block=st.integers(16, 40),
    buffer=st.integers(1, 20),
    name=st.sampled_from(sorted(LEVELS)),
    rope=st.sampled_from([None, ROPES["halves"], ROPES["interleaved"]]),
    outliers=st.sampled_from([0.0, 0.1]),
)


@streams
@with_streams
def test_however_tokens_come_they_are_clustered_alike(
    pieces: list[int], block: int, buffer: int, name: str, rope: RopeFacts | None, outliers: float
) -> None:
    in_pieces, one_by_one = (
        _decoding(name, block=block, buffer=buffer, rope=rope, outliers=outliers) for _ in range(2)
    )
    in_pieces.steps(pieces)
    one_by_one.steps([1] * sum(pieces))
    expected = one_by_one.found
    for entry, tensor in in_pieces.found.items():
        assert torch.equal(tensor, expected[entry]), entry


@streams
@with_streams
def test_every_token_is_in_one_row_of_its_block_or_waits(
    pieces: list[int], block: int, buffer: int, name: str, rope: RopeFacts | None, outliers: float
) -> None:
    decoding = _decoding(name, block=block, buffer=buffer, rope=rope, outliers=outliers)
    decoding.steps(pieces)
    (keys, values), sinks = decoding.rows(), decoding.layer.split.sinks
    order, cuts = decoding.found["token_order"], block_offsets(decoding.middle, block)
    assert decoding.selector.open_row == cuts[-2]
    for start, stop in pairwise(cuts):
        assert torch.equal(order[:, start:stop].sort(1).values, torch.arange(start, stop).expand(HEADS, -1))
    waiting = keys.shape[1] - sinks - decoding.middle
    assert buffer <= waiting < 2 * buffer or decoding.middle == MIDDLE
    for rows, laid_out, exact in zip(
        (keys, values),
        (decoding.sparse.plan.middle.keys, decoding.sparse.plan.middle.values),
        decoding.sparse.exact_rows(),
        strict=True,
    ):
        assert torch.equal(laid_out.rows, rows[:, sinks:].gather(1, order[..., None].expand(-1, -1, SIZE)))
        assert torch.equal(exact, torch.cat([rows[:, :sinks], rows[:, -waiting:]], 1))
    assert decoding.sparse.get_seq_length() == keys.shape[1]


@streams
@with_streams
def test_counts_and_centroids_are_those_of_the_members_at_every_level(
    pieces: list[int], block: int, buffer: int, name: str, rope: RopeFacts | None, outliers: float
) -> None:
    decoding = _decoding(name, block=block, buffer=buffer, rope=rope, outliers=outliers)
    decoding.steps(pieces)
    found, middle = decoding.found, decoding.middle
    cluster = (
        torch.searchsorted(
            found["starts"].contiguous(), torch.arange(middle).expand(HEADS, -1).contiguous(), right=True
        )
        - 1
    )
    keys, values = decoding.sparse.plan.middle.keys.rows, decoding.sparse.plan.middle.values.rows
    kinds = {"centroids": keys, "value_centroids": values}
    if rope is not None:
        kinds["lookup_centroids"] = rotated(keys, -decoding.layer.split.sinks - found["token_order"], rope)
    for level in range(len(LEVELS[name])):
        counts = found[f"level{level}.counts"]
        members = torch.nn.functional.one_hot(cluster, counts.shape[1]).double()
        assert torch.equal(counts.double(), members.sum(1))
        for kind, laid_out in kinds.items():
            sums = torch.einsum("hmc,hmd->hcd", members, laid_out.double())
            assert_close(found[f"level{level}.{kind}"] * counts[..., None], sums, 1e-5)
        if level + 1 < len(LEVELS[name]):
            cluster = found[f"level{level}.parent"].gather(1, cluster)


@streams
@with_streams
def test_the_children_of_a_cluster_are_neighbours_after_updates(
    pieces: list[int], block: int, buffer: int, name: str, rope: RopeFacts | None, outliers: float
) -> None:
    decoding = _decoding(name, block=block, buffer=buffer, rope=rope, outliers=outliers)
    decoding.steps(pieces)
    found = decoding.found
    for level in range(1, len(LEVELS[name])):
        filled, parent = found[f"level{level - 1}.counts"] > 0, found[f"level{level - 1}.parent"]
        counts = found[f"level{level}.counts"]
        for head in range(HEADS):
            runs = zip(found[f"level{level}.first_child"][head], found[f"level{level}.children"][head], strict=True)
            for number, (first, children) in enumerate(runs):
                if counts[head, number]:
                    own = (filled[head] & (parent[head] == number)).nonzero()[:, 0]
                    assert own.tolist() == list(range(int(first), int(first + children)))


@pytest.mark.thinned
@every_lookup
@pytest.mark.parametrize("share", [0.02, 0.2, 1.0])
def test_every_token_is_represented_once(name: str, share: float) -> None:
    decoding = _decoding(name, budget=Budget(share))
    for _ in range(12):
        decoding.steps([1] * 5)
        chosen = decoding.select(Budget(share))
        stand_for = sum(part.log_counts.exp().sum(-1) for part in chosen.attended_segments())
        exact = decoding.sparse.exact_rows()[0].shape[1]
        represented = chosen.rows.lengths.sum(-1) + stand_for + exact
        expected = torch.full_like(represented, decoding.layer.split.tokens + decoding.new)
        assert_close(represented, expected, 1e-6)
        assert bool((chosen.rows.lengths.sum(-1) == Budget(share).tokens(decoding.middle)).all())


@every_lookup
def test_with_everything_chosen_attention_stays_dense_while_blocks_close(name: str) -> None:
    decoding = _decoding(name)
    for tokens in [30, *[1] * 60]:
        output = decoding.step(tokens)
        keys, values = decoding.rows()
        if tokens == 1:
            query = normal(decoding.new - 1, HEADS * GROUP, 1, SIZE).unflatten(0, (HEADS, GROUP))
            assert_close(output, reference_attention(query, keys, values, 0.2).flatten(0, 1), 1e-5)
    assert decoding.selector.open_row > block_offsets(MIDDLE, 32)[-2]


def test_a_question_moves_nothing_before_the_first_step_of_its_answer() -> None:
    decoding = _decoding()
    decoding.steps([100, 5])
    assert decoding.middle == MIDDLE
    decoding.step()
    assert decoding.middle == MIDDLE + (TAIL + 106) // 8 * 8 - 8


@pytest.mark.thinned
@every_lookup
@pytest.mark.parametrize("rope", [None, ROPES["halves"]], ids=["as attended", "windowed"])
def test_a_rewound_layer_holds_exactly_what_is_stored_and_answers_alike(name: str, rope: RopeFacts | None) -> None:
    used, fresh = (_decoding(name, budget=Budget(0.1), rope=rope) for _ in range(2))
    first = used.steps([50, *[1] * 30])
    assert used.middle > MIDDLE
    used.sparse.rewind()
    used.new = 0
    assert used.found.keys() == fresh.found.keys()
    assert all(torch.equal(tensor, fresh.found[entry]) for entry, tensor in used.found.items())
    assert torch.equal(used.sparse.plan.middle.keys.rows, fresh.sparse.plan.middle.keys.rows)
    assert torch.equal(used.sparse.plan.middle.values.rows, fresh.sparse.plan.middle.values.rows)
    assert all(map(torch.equal, used.sparse.exact_rows(), fresh.sparse.exact_rows()))
    assert used.sparse.get_seq_length() == fresh.sparse.get_seq_length()
    assert IndexCache([used.sparse]).kv_fraction() == 0
    assert all(map(torch.equal, used.steps([50, *[1] * 30]), first))
    assert all(map(torch.equal, fresh.steps([50, *[1] * 30]), first))


def test_without_streaming_everything_new_stays_exact() -> None:
    decoding = _decoding(stream=False)
    decoding.steps([40, *[1] * 100])
    assert decoding.sparse.exact_rows()[0].shape[1] == decoding.layer.split.sinks + TAIL + 140
    assert decoding.sparse.plan.middle.used == MIDDLE


def test_rows_before_the_open_block_are_neither_moved_nor_copied_by_an_update() -> None:
    decoding = _decoding()
    decoding.steps([TAIL, 1])
    buffers = [decoding.sparse.plan.middle.keys.buffer.data_ptr(), decoding.found["level0.centroids"].data_ptr()]
    open_row, before = decoding.selector.open_row, decoding.sparse.plan.middle.keys.rows.clone()
    clusters = decoding.found["level0.centroids"].clone()
    closed = int((decoding.found["starts"][0] < open_row).sum())
    decoding.steps([1] * 80)
    assert decoding.selector.open_row > open_row > 0
    assert torch.equal(decoding.sparse.plan.middle.keys.rows[:, :open_row], before[:, :open_row])
    assert torch.equal(decoding.found["level0.centroids"][:, :closed], clusters[:, :closed])
    assert [
        decoding.sparse.plan.middle.keys.buffer.data_ptr(),
        decoding.found["level0.centroids"].data_ptr(),
    ] == buffers


def test_kv_fraction_counts_a_growing_middle_and_what_updates_read() -> None:
    decoding = _decoding(budget=Budget(10), block=128)
    sparse, dense = 0, 0
    for _ in range(30):
        middle, open_row = decoding.middle, decoding.selector.open_row
        decoding.step()
        if decoding.middle > middle:
            for tokens in range(middle + 8, decoding.middle + 1, 8):
                # The block's keys, in the first assignment and in each refinement; and its rows, laid out again.
                sparse += (1 + REFINEMENTS + 2) * (tokens - open_row)
        assert decoding.selector.open_row == open_row
        sparse += 2 * 10 + 2 * decoding.found["level0.counts"].shape[1]
        dense += 2 * decoding.middle
    assert decoding.middle > MIDDLE
    assert IndexCache([decoding.sparse]).kv_fraction() == pytest.approx(sparse / dense)

"""The keys of highest rank: the kernels return exactly the keys that a sort returns."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_runs import DEVICE, compiled_or_interpreted, poisoned_memory

from sparsekv.kernels.posting_lists.list_ranks import FEW_RANKS, RANKS, KeyGroups, TokenRanks, laid_out, top_ranked
from sparsekv.kernels.posting_lists.posting_lists import TILE_TOKENS
from sparsekv.kernels.posting_lists.top_ranks_triton import top_ranked_triton

pytestmark = compiled_or_interpreted


def ranked(seed: int, heads: int, keys: int, different: int, *, few: bool = False) -> TokenRanks:
    """Random ranks with `different` values, each of about the same number of keys; few: each is counted."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, FEW_RANKS if few else RANKS, (different,), generator=generator)
    ranks = values[torch.randint(0, different, (heads, keys), generator=generator)]
    placed = laid_out(ranks.int(), torch.zeros(heads, 1), few=few)
    return replace(placed, ranks=placed.ranks.to(DEVICE), coarse=placed.coarse.to(DEVICE))


@pytest.fixture(params=["few programs", "many programs"])
def programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few write all their keys at the same time, many one key of each word after another."""
    monkeypatch.setattr("sparsekv.kernels.posting_lists.top_ranks_triton.MANY", 0 if "many" in request.param else 1000)


@given(
    st.integers(0, 10**6), st.integers(1, 2 * TILE_TOKENS), st.sampled_from([1, 3, 500]), st.floats(0, 1), st.booleans()
)
@settings(max_examples=16)
def test_the_same_as_by_a_sort(seed: int, keys: int, different: int, share: float, few: bool) -> None:
    ranks, wanted = ranked(seed, 2, keys, different, few=few), round(share * keys)
    with poisoned_memory():
        chosen = top_ranked_triton(ranks, wanted)
    assert torch.equal(chosen, top_ranked.reference(ranks, wanted))


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("wanted", [1, 5000, 3 * TILE_TOKENS - 5])
def test_counts_of_more_tiles_than_are_added_up_at_a_time(
    wanted: int, few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsekv.kernels.posting_lists.top_ranks_triton.MOST_ROWS", 4 if few else 2)
    ranks = ranked(7, 2, 3 * TILE_TOKENS - 5, 40, few=few)
    assert torch.equal(top_ranked_triton(ranks, wanted), top_ranked.reference(ranks, wanted))


@pytest.mark.thinned
@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("different", [1, 3, 500])
def test_the_same_however_many_programs_there_are(different: int, few: bool) -> None:
    ranks = ranked(11, 2, TILE_TOKENS + 77, different, few=few)
    for wanted in (0, 1, 901, TILE_TOKENS + 77):
        with poisoned_memory():
            chosen = top_ranked_triton(ranks, wanted)
        assert torch.equal(chosen, top_ranked.reference(ranks, wanted))


@pytest.mark.parametrize("few", [False, True])
def test_of_equal_ranks_the_first_keys_are_taken(few: bool) -> None:
    ranks = ranked(0, 1, 60, 1, few=few)
    assert top_ranked_triton(ranks, 9).tolist() == [list(range(9))]


@pytest.mark.usefixtures("programs")
def test_names_in_the_place_of_numbers() -> None:
    ranks = ranked(3, 2, 5000, 60)
    names = torch.stack([torch.arange(5000), torch.arange(5000, 10_000)]).int().flip(1).contiguous().to(DEVICE)
    with poisoned_memory():
        chosen = top_ranked_triton(ranks, 700, names)
    assert torch.equal(chosen, names.gather(1, top_ranked.reference(ranks, 700).long()))
    assert torch.equal(chosen, top_ranked.reference(ranks, 700, names))


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("labels_of", [torch.int16, torch.int32])
def test_what_is_chosen_of_each_group(named: bool, labels_of: torch.dtype) -> None:
    """Counted by name, where names are a third of the keys."""
    ranks, groups = ranked(5, 2, 3000, 40, few=not named), 37
    generator = torch.Generator().manual_seed(1)
    names = torch.arange(0, 9000, 3).expand(2, -1).int().to(DEVICE) if named else None
    labels = torch.randint(0, groups, (2, 9000), generator=generator).to(DEVICE, labels_of)
    taken, expected = (torch.zeros(2, groups, dtype=torch.int32, device=DEVICE) for _ in range(2))
    with poisoned_memory():
        chosen = top_ranked_triton(ranks, 700, names, KeyGroups(labels, taken))
    again = top_ranked.reference(ranks, 700, names, KeyGroups(labels, expected))
    assert torch.equal(chosen, again)
    each = zip(labels, chosen.long(), strict=True)
    counted = torch.stack([torch.bincount(label[of_head], minlength=groups) for label, of_head in each])
    assert torch.equal(taken, counted.int())
    assert torch.equal(expected, taken)

"""QuoKA's choice of keys by kernels, against its definition in float64."""

import pytest
import torch
from support.kernel_runs import DEVICE, compiled_or_interpreted, poisoned_memory
from support.random_tensors import normal
from support.reference import assert_close

from sparsekv.kernels.scores.quoka import MOST_DIRECTIONS, far_directions, nearest_keys
from sparsekv.kernels.scores.quoka_triton import far_directions_triton, nearest_keys_triton

pytestmark = compiled_or_interpreted
STEP = 2.0**-15  # resolution of cosines
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def chosen(some: torch.Tensor, keys: torch.Tensor, count: int, first: int = 0, last: int = 0) -> torch.Tensor:
    with poisoned_memory():
        return nearest_keys_triton(some.to(DEVICE), keys.to(DEVICE), count, first, last).cpu()


def highest_cosines(some: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Highest cosine [H, T] float64 of each key with any direction."""
    products = torch.einsum("hqd,htd->hqt", some.double(), keys.double()).amax(1)
    return products / keys.double().norm(dim=-1).clamp(min=1e-12)


def assert_best(rows: torch.Tensor, cosines: torch.Tensor, count: int, first: int, last: int) -> None:
    """Each head has `count` keys, ascending, with the first and last keys, and no better key is left out."""
    heads, tokens = cosines.shape
    assert rows.shape == (heads, count)
    assert bool((rows.diff(dim=-1) > 0).all())
    taken = torch.zeros(heads, tokens, dtype=torch.bool).scatter_(1, rows, True)
    assert bool(taken[:, :first].all())
    assert bool(taken[:, tokens - last :].all())
    free = torch.arange(tokens).expand_as(taken)
    free = (free >= first) & (free < tokens - last)
    worst = cosines.masked_fill(~(taken & free), torch.inf).amin(1)
    best_left = cosines.masked_fill(taken | ~free, -torch.inf).amax(1)
    assert bool((best_left <= worst + STEP + 1e-5).all())


def unit(seed: int, *shape: int) -> torch.Tensor:
    return torch.nn.functional.normalize(normal(seed, *shape), dim=-1)


@by_dtype
@pytest.mark.parametrize(("G", "D"), [(1, 64), (3, 96), (8, 128), (4, 256)])
def test_directions_are_those_of_the_queries_least_like_their_mean(G: int, D: int, dtype: torch.dtype) -> None:
    query = (normal(D, 2, 70, G, D) + 0.2).to(dtype).transpose(1, 2)
    with poisoned_memory():
        found = far_directions_triton(query.to(DEVICE), 5).cpu()
    exact = query.double()
    nearness = torch.cosine_similarity(exact, exact.mean(2, keepdim=True), dim=-1)
    kept = exact.gather(2, nearness.argsort(-1)[..., :5, None].expand(-1, -1, -1, D))
    assert_close(found, (kept / kept.norm(dim=-1, keepdim=True)).mean(1), 1e-5)


@pytest.mark.thinned
@by_dtype
@pytest.mark.parametrize("D", [64, 96, 128, 256])
def test_the_nearest_keys_are_chosen(D: int, dtype: torch.dtype) -> None:
    # Rounded beforehand, because the interpreter rounds to bfloat16 differently from a GPU.
    some, keys = unit(0, 2, 5, D).to(dtype).float(), (2 * normal(1, 2, 300, D)).to(dtype)
    assert_best(chosen(some, keys, 40, 3, 6), highest_cosines(some, keys), 40, 3, 6)


@pytest.mark.parametrize(("first", "last"), [(0, 0), (20, 0), (0, 20), (7, 5)])
@pytest.mark.parametrize("tokens", [21, 128, 333])
def test_first_and_last_keys_whatever_their_cosine(tokens: int, first: int, last: int) -> None:
    some, keys = unit(2, 3, 16, 64), normal(3, 3, tokens, 64)
    keys[:, :2], keys[:, -2:] = -some[:, :2], -some[:, :2]
    assert_best(chosen(some, keys, 20, first, last), highest_cosines(some, keys), 20, first, last)


def test_more_keys_than_a_program_looks_at_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """With three programs a head, each with several chunks of 64 keys, of which the last is not full."""
    monkeypatch.setattr("sparsekv.kernels.scores.quoka_triton.CHUNK", 64)
    monkeypatch.setattr("sparsekv.kernels.scores.quoka_triton.PARTS", 3)
    some, keys = unit(4, 2, 1, 64), normal(5, 2, 500, 64)
    for count in (1, 90, 499, 500):
        assert_best(chosen(some, keys, count), highest_cosines(some, keys), count, 0, 0)


@pytest.mark.parametrize("tokens", [80, 333])
def test_keys_that_point_away_where_most_are_chosen(tokens: int) -> None:
    some, keys = unit(12, 2, 1, 64), normal(13, 2, tokens, 64)
    count = tokens * 9 // 10
    assert_best(chosen(some, keys, count, 2, 3), highest_cosines(some, keys), count, 2, 3)


def test_equal_cosines_are_taken_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsekv.kernels.scores.quoka_triton.CHUNK", 64)
    keys = unit(6, 1, 1, 64).expand(2, 200, 64)
    assert chosen(keys[:, :1], keys, 103, 2, 3).tolist() == [[*range(100), 197, 198, 199]] * 2


def test_a_part_of_longer_rows_in_which_heads_alternate() -> None:
    some, held = unit(7, 2, 4, 64), normal(8, 150, 2, 64)
    keys = held.transpose(0, 1)[:, :120]
    assert_best(chosen(some, keys, 30), highest_cosines(some, keys), 30, 0, 0)


def test_keys_of_nothing_have_no_direction() -> None:
    """Their cosine is 0: they rank after keys along a direction, and before keys in the opposite one."""
    some = unit(9, 1, 1, 64)
    keys = torch.cat([-some, 0 * some, some, -some], 1)
    assert chosen(some, keys, 2).tolist() == [[1, 2]]


def test_the_same_as_in_plain_torch() -> None:
    """The cosines are far enough apart here that rounding them to ranks changes no choice."""
    some, keys = unit(10, 3, 16, 64), normal(11, 3, 400, 64)
    for directions in (some, some.mean(1, keepdim=True)):
        expected = nearest_keys(directions, keys, 50, 4, 8).sort(-1).values
        found = nearest_keys(directions.to(DEVICE), keys.to(DEVICE), 50, 4, 8).cpu().sort(-1).values
        assert torch.equal(found, expected)
        assert torch.equal(chosen(directions, keys, 50, 4, 8), expected)


def test_more_directions_and_queries_than_kernels_hold_go_to_plain_torch() -> None:
    some, keys = unit(12, 2, MOST_DIRECTIONS + 1, 16), normal(13, 2, 200, 16)
    found = nearest_keys(some.to(DEVICE), keys.to(DEVICE), 40).cpu().sort(-1).values
    assert torch.equal(found, nearest_keys.reference(some, keys, 40).sort(-1).values)
    query = normal(14, 2, 3, MOST_DIRECTIONS + 9, 16)
    for count in (MOST_DIRECTIONS + 1, MOST_DIRECTIONS + 9):
        assert_close(far_directions(query.to(DEVICE), count).cpu(), far_directions.reference(query, count), 1e-5)

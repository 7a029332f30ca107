"""Joining what several queries choose: against sets, and plain torch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernel_runs import DEVICE, compiled_or_interpreted, poisoned_memory

from sparsekv.kernels.codes.code_ranks import JoinedKeys, join_chosen
from sparsekv.kernels.codes.joint_ranks_triton import join_chosen_triton
from sparsekv.kernels.posting_lists.list_ranks import KeyGroups

pytestmark = compiled_or_interpreted


def chosen_keys(seed: int, B: int, K: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Different keys of each query [2, B, K], and each key's group [2, keys] of 7."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(2, B, keys, generator=generator).argsort(-1)[..., :K]
    return chosen.int(), torch.randint(0, 7, (2, keys), generator=generator)


def join(chosen: torch.Tensor, labels: torch.Tensor, capacity: int, *, plain: bool) -> tuple[JoinedKeys, torch.Tensor]:
    """Return the joined keys, and how many keys of each group were taken."""
    device = torch.device("cpu") if plain else DEVICE
    groups = KeyGroups(labels.to(device), torch.zeros(2, 7, dtype=torch.int32, device=device))
    with poisoned_memory():
        function = join_chosen.reference if plain else join_chosen_triton
        found = function(chosen.to(device), capacity, groups)
    return JoinedKeys(found.rows.cpu(), found.used.cpu()), groups.taken.cpu()


@pytest.mark.parametrize("plain", [True, False], ids=["torch", "kernels"])
@settings(max_examples=12)
@given(
    seed=st.integers(0, 10**6),
    B=st.integers(1, 5),
    keys=st.sampled_from([1, 40, 1023, 1024, 1025, 3000]),
    data=st.data(),
)
def test_every_key_that_any_query_chose_is_there_once(
    plain: bool, seed: int, B: int, keys: int, data: st.DataObject
) -> None:
    K = data.draw(st.integers(1, keys))
    chosen, labels = chosen_keys(seed, B, K, keys)
    found, taken = join(chosen, labels.short(), min(keys, B * K), plain=plain)
    for head in range(2):
        union = chosen[head].unique().int()
        assert int(found.used[head]) == len(union)
        assert torch.equal(found.rows[head, : len(union)], union)
        assert torch.equal(taken[head].long(), torch.bincount(labels[head, union.long()], minlength=7))


def test_labels_of_four_bytes_and_heads_that_are_further_apart() -> None:
    chosen, labels = chosen_keys(0, 3, 50, 2000)
    apart = torch.full((2, 2500), 6, dtype=torch.int32)
    apart[:, :2000] = labels
    found, taken = join(chosen, apart.to(DEVICE)[:, :2000], 150, plain=False)
    expected, of_each = join(chosen, labels.int(), 150, plain=True)
    assert torch.equal(found.used, expected.used)
    assert torch.equal(taken, of_each)

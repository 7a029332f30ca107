"""Hashes against their definitions, and the prefix of an edited document that chained hashes find."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from sparsekv.formats.checksums import (
    BLOCK_TOKENS,
    chained_block_hashes,
    common_prefix_tokens,
    hash_bytes,
    hash_file,
    hash_json,
    hash_tokens,
)

tokens = st.integers(0, 2**40)


def test_a_file_hashes_as_its_bytes(tmp_path: Path) -> None:
    data = bytes(range(256)) * 5000
    (tmp_path / "file").write_bytes(data)
    assert hash_file(tmp_path / "file") == hash_bytes(data) == hashlib.sha256(data).hexdigest()


@given(st.lists(tokens, min_size=1, max_size=40))
def test_tokens_hash_as_the_stored_tensor_does(ids: list[int]) -> None:
    stored = save({"input_ids": torch.tensor(ids)})
    assert hash_tokens(ids) == hash_bytes(stored[-8 * len(ids) :])


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=6))
def test_json_hashes_alike_in_any_order(value: dict[str, Any]) -> None:
    backwards = dict(reversed(value.items()))
    assert hash_json({"a": value, "b": 1}) == hash_json({"b": 1, "a": backwards})
    assert hash_json(value) != hash_json({**value, "one more": None})


@st.composite
def two_prompts(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Two prompts of up to four blocks and the number of leading tokens that they share."""
    length = draw(st.integers(0, 4 * BLOCK_TOKENS))
    shared = draw(st.integers(0, length) | st.sampled_from(range(0, length + 1, BLOCK_TOKENS)))
    first = list(range(length))
    other_end = draw(st.integers(0, 2 * BLOCK_TOKENS))
    return first, first[:shared] + [-1 - token for token in range(other_end)], shared


@given(two_prompts())
def test_chains_share_exactly_the_whole_blocks_that_the_prompts_share(
    prompts: tuple[list[int], list[int], int],
) -> None:
    first, second, shared = prompts
    chains = [chained_block_hashes(prompt) for prompt in (first, second)]
    assert [len(chain) for chain in chains] == [len(prompt) // BLOCK_TOKENS for prompt in (first, second)]
    expected = shared // BLOCK_TOKENS * BLOCK_TOKENS
    assert common_prefix_tokens(*chains) == common_prefix_tokens(*reversed(chains)) == expected


def test_a_chain_tells_the_order_of_equal_blocks() -> None:
    a, b = [1] * BLOCK_TOKENS, [2] * BLOCK_TOKENS
    same, swapped = chained_block_hashes(a + b + a), chained_block_hashes(b + a + a)
    assert all(one != other for one, other in zip(same, swapped, strict=True))

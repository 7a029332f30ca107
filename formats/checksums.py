"""Hashes of files and of JSON-like values, and chained hashes that tell which tokens an edited document can keep."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

BLOCK_TOKENS = 256
_PIECE = 1 << 20


def hash_bytes(data: bytes | bytearray | memoryview) -> str:
    """sha256 of some bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


def hash_file(path: Path) -> str:
    """sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_descriptor(descriptor: int) -> str:
    """sha256 of an open file from its beginning, in hex; thread-safe, because the descriptor's offset is not used."""
    digest, place = hashlib.sha256(), 0
    while piece := os.pread(descriptor, _PIECE, place):
        digest.update(piece)
        place += len(piece)
    return digest.hexdigest()


def hash_json(value: Any) -> str:
    """sha256 of a JSON-like value, in hex; the order of its keys does not matter."""
    return hash_bytes(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def hash_tokens(input_ids: Sequence[int]) -> str:
    """sha256 of token ids as little-endian int64, the bytes stored in `tokens.safetensors`, in hex."""
    return hash_bytes(np.asarray(input_ids, dtype="<i8").tobytes())


def chained_block_hashes(input_ids: Sequence[int]) -> list[str]:
    """One hash per whole block of 256 tokens, each over its block and the hash before it.

    Two prompts share their first 256 n tokens exactly when entry n - 1 is equal in both.
    """
    chain, previous = [], ""
    for start in range(0, len(input_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        previous = hash_bytes((previous + hash_tokens(input_ids[start : start + BLOCK_TOKENS])).encode())
        chain.append(previous)
    return chain


def common_prefix_tokens(first: Sequence[str], second: Sequence[str]) -> int:
    """Number of leading tokens, in whole blocks, that two chains of block hashes share."""
    shared = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        shared += BLOCK_TOKENS
    return shared

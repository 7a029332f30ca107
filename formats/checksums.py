"""Compute sha256 checksums of files and JSON-like values, and chained hashes of token blocks.

The chained hashes show which leading tokens of an edited document are unchanged.
"""

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
    """Compute the sha256 of bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


def hash_file(path: Path) -> str:
    """Compute the sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_descriptor(descriptor: int) -> str:
    """Compute the sha256 of an open file from its beginning, in hex.

    Several threads may do this at the same time, because the descriptor's offset is neither used nor changed.
    """
    digest, place = hashlib.sha256(), 0
    while piece := os.pread(descriptor, _PIECE, place):
        digest.update(piece)
        place += len(piece)
    return digest.hexdigest()


def hash_json(value: Any) -> str:
    """Compute the sha256 of a JSON-like value, in hex. The order of keys in dictionaries does not matter."""
    return hash_bytes(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def hash_tokens(input_ids: Sequence[int]) -> str:
    """Compute the sha256 of token ids, in hex.

    The ids are hashed as little-endian int64, which are the bytes that `tokens.safetensors` stores.
    """
    return hash_bytes(np.asarray(input_ids, dtype="<i8").tobytes())


def chained_block_hashes(input_ids: Sequence[int]) -> list[str]:
    """Compute one hash per whole block of 256 tokens; each covers its block and the previous hash.

    Two prompts share their first 256 n tokens exactly when entry n - 1 of their hashes is equal.
    """
    chain, previous = [], ""
    for start in range(0, len(input_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        previous = hash_bytes((previous + hash_tokens(input_ids[start : start + BLOCK_TOKENS])).encode())
        chain.append(previous)
    return chain


def common_prefix_tokens(first: Sequence[str], second: Sequence[str]) -> int:
    """Count the leading tokens, in whole blocks, that two prompts share by their `chained_block_hashes`."""
    shared = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        shared += BLOCK_TOKENS
    return shared

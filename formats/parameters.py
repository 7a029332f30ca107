"""Parameters of a method, an indexer or a prefill as a manifest holds them: JSON, in which tuples are lists."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any


def stored_parameters(method: Any) -> dict[str, Any]:
    """The fields of a dataclass as they are read back, so that both compare equal."""
    stored: dict[str, Any] = json.loads(json.dumps(asdict(method)))
    return stored


def given_parameters(stored: Mapping[str, Any]) -> dict[str, Any]:
    """What a dataclass is made of again."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()}

"""Every family of causal language models that transformers has: answered rightly, or refused before the prefill."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest
from support.causal_families import families, variants
from support.family_sweep import Outcome, sweep
from support.short_part import short_part

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "models.md").read_text(encoding="utf-8")
PINNED = re.search(r"transformers ([\d.]+) has", PAGE).group(1)  # type: ignore[union-attr]
TABLE = dict(re.findall(r"^\| `([^`]+)` \| ([^|]*) \|", PAGE, re.MULTILINE))
"""Settings that are answered rightly, by family."""
RISKY = (
    "afmoe", "bloom", "deepseek_v3", "diffllama", "doge", "falcon_h1", "gemma2", "gemma3n_text", "gemma4_text",
    "gpt_oss", "jetmoe", "llama", "llama4_text", "mamba", "minicpm3", "phimoe", "qwen2_moe", "qwen3_next",
)  # fmt: skip
"""Masks, windows and shapes of their own."""


def _every(names: tuple[str, ...]) -> list[str]:
    """Return the names of the families that the installed version of transformers has."""
    return [name for name in names if name in families()]


def _check(family: str) -> None:
    found: dict[str, Outcome] = {name or "default": sweep(family, change) for name, change in variants(family).items()}
    assert {name: one for name, one in found.items() if one.verdict not in ("right", "refused", "unmade")} == {}
    assert all(one.reason and "\n" not in one.reason for one in found.values() if one.verdict == "refused")
    if version("transformers") == PINNED:
        assert ", ".join(name for name, one in found.items() if one.verdict == "right") == TABLE[family]


def test_the_table_has_every_family() -> None:
    if version("transformers") == PINNED:
        assert sorted(TABLE) == sorted(families())


@pytest.mark.parametrize("family", short_part(_every(RISKY), every=3))
def test_a_risky_family_is_right_or_refused(family: str) -> None:
    _check(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in families() if name not in RISKY])
def test_a_family_is_right_or_refused(family: str) -> None:
    _check(family)

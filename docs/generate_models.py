"""Writes docs/reference/models.md from what a sweep of the installed transformers' families finds."""

import re
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.causal_families import families, variants
from support.family_sweep import Outcome, sweep

PAGE = Path(__file__).parent / "reference" / "models.md"
HEAD = """# Models

This page lists the families of causal language models that can be indexed. `make docs` writes it. For each family that
transformers {version} has, a tiny random model goes through a build and two answers (`dense`, and a method at 100%).
The answers are compared with those of plain transformers on the same token ids. `tests/families/` repeats that.

A build does not read this table. Before the prefill it tries its model on 48 tokens. It refuses the model in one line
if the logits over captured keys and values differ from those of a plain run. So a checkpoint whose settings differ from
its family's default may be refused where the table has *right*, or answered rightly where the table has *refused*.

Keys and values are stored as a layer attends to them. A layer with latent attention (`deepseek_v2`, `deepseek_v3`,
`minicpm3` and others) makes keys and values of its latents for all heads. The index stores these keys and values, and
pads the smaller ones to the larger size. So the index is many times as large as the model's own cache, and `--gpus` is
refused. If layers share keys and values, the index has a copy for each of them. Methods that undo RoPE
(`multipole-windowed`, and `csattention` unless `--subspaces contiguous` is given) refuse latent attention, because RoPE
rotates only the last channels of its keys.

Beside `default`, a family's own default, these settings are tried where the family has them:

- `windows`: a sliding window, in every other layer if the config has a type for each layer, else in all layers
- `no windows`: no sliding window
- `shared`, `unshared`: two layers share the keys and values of earlier layers; no layer does
- `equal sizes`: keys and values of equal sizes
"""


def outcomes() -> dict[str, dict[str, Outcome]]:
    """Return each family's outcomes, by setting. Raises SystemExit if one is neither right, nor refused, nor unmade."""
    found = {name: {setting: sweep(name, change) for setting, change in variants(name).items()} for name in families()}
    faults = [
        f"{name} {setting}: {one.verdict}, {one.reason}"
        for name, settings in found.items()
        for setting, one in settings.items()
        if one.verdict not in ("right", "refused", "unmade")
    ]
    if faults:
        sys.exit("\n".join(["the page stays as it is:", *faults]))
    return found


def render(found: Mapping[str, Mapping[str, Outcome]]) -> str:
    """Return the whole page."""
    right = sum(any(one.verdict == "right" for one in of.values()) for of in found.values())
    text = HEAD.format(version=version("transformers"))
    text += f"\n{right} of {len(found)} families are answered rightly in at least one setting.\n\n"
    text += "| family | right | refused, and why |\n|---|---|---|\n"
    return text + "".join(row(family, of) for family, of in found.items())


def row(family: str, found: Mapping[str, Outcome]) -> str:
    """Return a family's line of the table."""
    settings = {name or "default": one for name, one in found.items()}
    right = ", ".join(name for name, one in settings.items() if one.verdict == "right")
    reasons: dict[str, list[str]] = {}
    for name, one in settings.items():
        if one.verdict != "right":
            reasons.setdefault(reason(family, one), []).append(name)
    refused = "; ".join(f"{', '.join(names)}: {why}" for why, names in reasons.items())
    return f"| `{family}` | {right} | {refused} |\n"


def reason(family: str, outcome: Outcome) -> str:
    """Return the reason why a family is refused, without the family's name and the remedy."""
    if outcome.verdict == "unmade":
        return f"not tried, as transformers makes no such model here ({outcome.reason})"
    why = outcome.reason.removeprefix(f"tiny-{family} cannot be indexed: ").removeprefix(f"tiny-{family} ")
    why = re.sub(r"^\(\S+\) ", "", why)
    for remedy in ("; choose another model", ": choose another model"):
        why = why.removesuffix(remedy)
    return why.replace(f"tiny-{family}", "the model").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(render(outcomes()), encoding="utf-8")

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

Families of causal language models that can be indexed. `make docs` writes this page: a tiny random model of each
family that transformers {version} has goes through a build and two answers (`dense`, and a method at 100%), compared
with plain transformers on the same token ids; `tests/families/` repeats that.

A build does not look in this table. It tries each model on 48 tokens before the prefill, and refuses it in one line
where its answers over captured keys and values are not its own. So a checkpoint with other settings than its family's
default may be refused, or answered rightly, against the table.

Keys and values are stored as a layer attends to them. With latent attention (`deepseek_v2`, `deepseek_v3`, `minicpm3`
and others) these are the keys and values that it makes of its latents, for all heads, and the smaller ones are padded
to the larger size. An index is then many times as large as the model's own cache, and `--gpus` is refused. Layers
that share keys and values have a copy each. Methods that undo RoPE (`multipole-windowed`, and `csattention` unless
`--subspaces contiguous` is given) refuse latent attention, of which RoPE turns only the last channels.

`windows` and the like are settings of a family, tried beside its default: layers with a sliding window in turn with
others (`windows`), none with one (`no windows`), layers that share keys and values (`shared`, `unshared`), keys and
values of equal sizes (`equal sizes`).
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
    text += f"\n{right} of {len(found)} families are answered rightly.\n\n"
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

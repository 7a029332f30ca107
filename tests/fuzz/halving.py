"""A deed of models in 16 bits, whose answers are compared with the same weights in float32."""

from dataclasses import replace
from typing import Any

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.runtime.decoding.answer import Sampling, question_ids
from sparsekv.runtime.decoding.choose_config import choose_config
from sparsekv.runtime.decoding.engine import Request
from sparsekv.runtime.decoding.lossless import DraftingEngine
from sparsekv.runtime.decoding.open import OpenIndex
from sparsekv.runtime.decoding.session import Session
from sparsekv.runtime.selection.interface import DENSE

from .deeds import deed
from .oracles import error_of, expect, plain
from .questions import fed_with, stepped, takes_everything
from .world import World

NEAR, NEAR_IN_8_BITS = 0.004, 0.1
"""Relative error of logits that is allowed in addition to three times transformers' error in the same dtype."""
CHOSEN = 2.5, 0.02
"""Limit of a method's distance from dense attention in 16 bits: a factor of the distance in float32, and a constant.

The distance of attention that selects nothing is always allowed. Rounding leads k-means of few keys to other clusters,
and a single selected key can decide the result.
"""
ALONE: dict[str, Any] = {"options": (), "residual": False, "ahead": False, "dense_layers": 0, "placement": "device"}
"""Changes to a case whose method selects nothing."""


@deed("halved", 2, asks=False)
def halved(world: World, index: OpenIndex) -> None:
    """Check that 16-bit answers are about as near to float32 as transformers', and a method as near to dense attention
    as in float32.

    Models of experts are left out, because rounding to 16 bits routes tokens to other experts.
    """
    if _has_experts(world):
        return
    case, dtype = world.case, (torch.bfloat16, torch.float16)[world.case.more % 2]
    case = replace(case, rounded=None, loud=0.0, prefill="dense", prefill_options=(), guard=None)
    folders = [world.folder / name for name in ("low", "high")]
    for folder in folders:
        folder.mkdir()
    low = World(case, folders[0], world.device, (dtype,))
    high = World(case, folders[1], world.device, (dtype, torch.float32))
    opened, exact = low.build("index.skv"), high.build("index.skv")
    asked = question_ids(opened, low.question(0), raw=case.raw)
    fed = fed_with(asked, low.dense(opened).ask(asked, Sampling(case.answer)).ids)
    ids, steps = torch.cat([opened.input_ids, fed]), slice(len(asked) - 1, None)
    truth = plain(high, ids)[0][len(opened.input_ids) :][steps]
    own = error_of(plain(low, ids)[0][len(opened.input_ids) :][steps], truth)
    near = 3 * own + (NEAR if case.kv_dtype is None else NEAR_IN_8_BITS)

    def apart(asker: Session, over: OpenIndex) -> float:
        return error_of(stepped(over, asker, fed, len(asked))[steps], truth)

    askers = {"dense": low.dense(opened)}
    if takes_everything(low):
        of_all = "100%" if case.question_prefill not in (None, "own", "dense") else None
        askers["everything"] = low.asker(opened, "100%", prefill_budget=of_all)
    for kind, asker in askers.items():
        expect((found := apart(asker, opened)) <= near, f"{kind} in {dtype}", f"{found:.4f}, transformers {own:.4f}")
    found, usual = apart(low.asker(opened), opened), apart(high.asker(exact), exact)
    nothing = apart(high.asker(exact, method="window", budget="", **ALONE), exact)
    times, more = CHOSEN
    told = f"{found:.4f}, in float32 {usual:.4f}, of nothing {nothing:.4f}, transformers {own:.4f}"
    expect(found <= max(times * usual, nothing) + 3 * own + more, f"sparse in {dtype}", told)
    _lossless(low, high, opened, asked, near)


def _has_experts(world: World) -> bool:
    settings = world.model.config.get_text_config().to_dict().items()
    return any("experts" in name and isinstance(value, int) and value > 1 for name, value in settings)


def _lossless(low: World, high: World, opened: OpenIndex, asked: torch.Tensor, near: float) -> None:
    """Check that each token of an answer from drafts is the likeliest in float32, up to rounding to 16 bits."""
    config = replace(choose_config(opened.artifact, DENSE), lossless=True)
    try:
        engine = DraftingEngine(opened, opened.cache(config), config)
    except UsageError:  # refused: a state, or RoPE that depends on the length
        return
    answer = dict(engine.answers([Request(asked, Sampling(4 * low.case.answer))]))[0].ids
    ids = torch.cat([opened.input_ids, fed_with(asked, answer)])
    steps = plain(high, ids)[0][len(opened.input_ids) + len(asked) - 1 :]
    for token, row in zip(answer, steps, strict=True):
        below = float(row.max() - row[token]) / float(steps.abs().max())
        expect(below <= 2 * near, "lossless in 16 bits", f"{token} of {answer} is {below:.4f} below the likeliest")

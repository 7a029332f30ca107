"""Estimate how long a prefill takes before it begins.

The estimate is made from the pace of the last prefill with the same settings on this machine. If none is stored, one
linear layer is timed.
"""

import json
import math
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import torch

from sparsekv.cli.common.console import MINUTE
from sparsekv.formats.distributed.process import own_place
from sparsekv.formats.user.cache import cache_root, read_small, replace_small
from sparsekv.indexing.plan import BuildPlan

LEAST_SECONDS = 10.0
"""Shortest estimated time of a prefill that is shown, in seconds."""
LEAST_TOKENS = 256
"""Number of tokens of the shortest prefill whose pace is stored."""
MOST_KEPT = 100
"""Maximum number of stored paces; each belongs to one `PaceMeter._key`."""
_FILE = "prefill_pace.json"


@dataclass(frozen=True)
class Pace:
    """Speed of a prefill: seconds for each token, and for each pair of a token and an earlier token."""

    per_token: float
    per_pair: float

    def seconds(self, first: int, end: int) -> float:
        """Return the seconds of a prefill of the tokens `first` to `end` (excluded)."""
        return self.per_token * (end - first) + self.per_pair * _pairs(first, end)

    @classmethod
    def fitted(cls, steps: list[tuple[float, int]], ratio: float) -> Self:
        """Fit a pace to the steps of a prefill.

        Args:
            steps: clock readings in seconds, ascending, each with the number of tokens prefilled by then.
            ratio: `per_pair` divided by `per_token`, used if the steps do not determine both.
        """
        chunks = [
            (end - first, _pairs(first, end), after - before) for (before, first), (after, end) in pairwise(steps)
        ]
        if len(chunks) > 2:
            found = _least_squares(chunks)
            if found is not None:
                return cls(*found)
        seconds = sum(chunk[2] for chunk in chunks)
        per_token = seconds / sum(tokens + ratio * pairs for tokens, pairs, _ in chunks)
        return cls(per_token, ratio * per_token)


def _pairs(first: int, end: int) -> float:
    return (end**2 - first**2) / 2


def _least_squares(chunks: list[tuple[int, float, float]]) -> tuple[float, float] | None:
    """Fit seconds per token and per pair to chunks of (tokens, pairs, seconds).

    Returns None if the chunks do not determine both times, or if one would be negative.
    """
    aa, ab, bb, ac, bc = (sum(one[i] * one[j] for one in chunks) for i, j in ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2)))
    determinant = aa * bb - ab * ab
    if determinant <= 1e-9 * aa * bb:
        return None
    found = (ac * bb - bc * ab) / determinant, (bc * aa - ac * ab) / determinant
    return found if min(found) >= 0 else None


class PaceMeter:
    """Estimates the time of a build's prefill beforehand, from the pace of an earlier prefill or of one linear layer.

    The pace of the finished prefill is stored in the user's cache, for later estimates.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, plan: BuildPlan, clock: Callable[[], float] = time.monotonic):
        self._plan, self._clock = plan, clock
        self._steps: list[tuple[float, int]] = []

    def told(self, first: int, end: int) -> str:
        """Return the time of a prefill of the tokens `first` to `end`, such as `about 3 min of prefill here`.

        The text is empty if the time is short or not known.
        """
        kept = _kept().get(self._key)
        pace = kept or self._timed()
        seconds = 0.0 if pace is None else pace.seconds(first, end)
        if seconds < LEAST_SECONDS:
            return ""
        takes = f"{seconds / MINUTE:.0f} min" if seconds >= 1.5 * MINUTE else f"{seconds:.0f} s"
        return f"about {takes} of prefill here" if kept else f"roughly {takes} of prefill here, judged by one layer"

    def show(self, done: int, total: int) -> None:
        """Record that `done` of `total` tokens are prefilled; on a GPU, only the first and the last call count.

        After the last token the pace is stored in the user's cache, if at least `LEAST_TOKENS` tokens were prefilled.
        """
        device = self._plan.loaded.model.device
        on_gpu = device.type == "cuda"
        if on_gpu and self._steps and done < total:
            return  # the GPU's work is queued and not yet finished, so the clock would measure too little
        if on_gpu:
            torch.cuda.synchronize(device)
        if not self._steps or done > self._steps[-1][1]:
            self._steps.append((self._clock(), done))
        if done == total and total - self._steps[0][1] >= LEAST_TOKENS:
            before = _kept().get(self._key)
            ratio = before.per_pair / before.per_token if before and before.per_token else self._ratio()
            _keep(self._key, Pace.fitted(self._steps, ratio))

    def _ratio(self) -> float:
        """Return the floating-point operations for a pair of tokens, divided by those of one token's linear layers."""
        config = self._plan.loaded.model.config.get_text_config()
        channels = config.num_attention_heads * self._plan.head_dim
        return float(4 * config.num_hidden_layers * channels / (2 * self._weights_of_token()))

    def _linear_layers(self) -> dict[torch.nn.Module, tuple[int, int]]:
        """Return the model's linear layers, also quantised ones, with their numbers of input and output features.

        The output embedding is left out, because a prefill applies it only to the last token of each chunk.
        """
        model, found = self._plan.loaded.model, dict[torch.nn.Module, tuple[int, int]]()
        head = model.get_output_embeddings()
        for module in model.modules():
            inputs, outputs = (getattr(module, f"{side}_features", None) for side in ("in", "out"))
            if module is not head and isinstance(inputs, int) and isinstance(outputs, int):
                found[module] = inputs, outputs
        return found

    def _weights_of_token(self) -> float:
        """Return the number of weights that a token is multiplied with.

        Of a layer's experts, only as many are counted as the router chooses for a token.
        """
        model = self._plan.loaded.model
        chosen = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or 0
        experts = sum(weight.numel() * chosen / len(weight) for weight in model.parameters() if weight.ndim == 3)
        return float(experts + sum(map(math.prod, self._linear_layers().values())))

    @torch.inference_mode()
    def _timed(self) -> Pace | None:
        """Time the model's largest linear layer, and estimate the model's pace as if all its weights were as fast.

        The time of attention follows from its number of operations. Returns None if the model has no linear layer, if
        the layer takes no rows in the model's dtype, or if several processes share the model.
        """
        layers, model = self._linear_layers(), self._plan.loaded.model
        if not layers or own_place() is not None:
            return None
        layer, (inputs, outputs) = max(layers.items(), key=lambda one: math.prod(one[1]))
        rows = torch.zeros(LEAST_TOKENS, inputs, dtype=model.dtype, device=model.device)
        try:
            layer(rows)  # the first call allocates and compiles
            before = self._clock()
            layer(rows).sum().item()  # waits for a GPU
        except (RuntimeError, TypeError, ValueError):  # an estimate never ends a build
            return None
        seconds = (self._clock() - before) / LEAST_TOKENS
        per_token = seconds / (inputs * outputs) * self._weights_of_token()
        return Pace(per_token, self._ratio() * per_token)

    @property
    def _key(self) -> str:
        """Key of the pace: the facts on which a prefill's speed depends, except the number of tokens."""
        loaded, place = self._plan.loaded, own_place()
        device = loaded.model.device
        by = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
        ranks = 1 if place is None else place.size
        prefill = self._plan.prefill_record.kind
        return json.dumps([platform.node(), by, ranks, loaded.name, loaded.weights, self._plan.dtype, prefill])


def _kept() -> dict[str, Pace]:
    """Read the stored paces by key. A damaged file counts as empty."""
    try:
        found: Any = json.loads(read_small(cache_root() / _FILE) or "{}")
        paces = {key: Pace(float(token), float(pair)) for key, (token, pair) in found.items()}
    except (AttributeError, RecursionError, TypeError, ValueError):
        return {}
    return {key: pace for key, pace in paces.items() if all(map(_is_pace, (pace.per_token, pace.per_pair)))}


def _is_pace(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds >= 0


def _keep(key: str, pace: Pace) -> None:
    others = {name: one for name, one in _kept().items() if name != key}
    latest = [*others.items()][1 - MOST_KEPT :]
    paces = {name: [one.per_token, one.per_pair] for name, one in (*latest, (key, pace))}
    replace_small(cache_root() / _FILE, json.dumps(paces, indent=1) + "\n")

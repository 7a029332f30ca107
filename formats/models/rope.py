"""RoPE scaling, which extends a model beyond its trained positions: `yarn:F` and `dynamic:F`. Also a model's number of
positions."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from sparsekv.formats.errors import LEAVE_OUT, UsageError

STRETCHED = ("linear", "longrope", "yarn")
"""RoPE types with which a model's number of positions is `factor` times its original number of positions.

`llama3` is not such a type: Llama 3.2 has a factor of 32 and 8,192 original positions, but 131,072 positions.
"""

if TYPE_CHECKING:  # transformers takes a second to import
    from transformers import PreTrainedConfig


def rope_depends_on_length(parameters: dict[str, Any] | None) -> bool:
    """Whether RoPE frequencies change with the length of a sequence (dynamic, longrope).

    A chunked prefill would then rotate its chunks by different frequencies.
    """
    return any(kind.get("rope_type") in ("dynamic", "longrope") or "long_mscale" in kind for kind in _kinds(parameters))


def positions_of(config: "PreTrainedConfig") -> int | None:
    """Return the number of positions that a model supports; None if its config has no limit.

    With YaRN, `max_position_embeddings` may still be the original length, as in Qwen's recipe. The model then supports
    the original length times the factor. With dynamic RoPE the result is `max_position_embeddings`, because the
    frequencies change beyond that length.

    A sliding window of at least `max_position_embeddings` tokens counts as no window (`kernels.common.mask`), which is
    wrong for longer sequences. The window then is the limit.
    """
    config = config.get_text_config()
    positions: int | None = getattr(config, "max_position_embeddings", None)
    if positions is None:
        return None
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    full = rope.get("full_attention", rope) or {}  # None for layers without RoPE
    original, factor = full.get("original_max_position_embeddings"), full.get("factor")
    if full.get("rope_type") not in STRETCHED or original is None or factor is None:
        return positions
    stretched, window = max(positions, int(original * factor)), getattr(config, "sliding_window", None) or 0
    return min(stretched, window) if window >= positions else stretched


def positions_after(config: "PreTrainedConfig", document: int) -> int | None:
    """Return the number of positions that a model supports for sequences that begin with a document; None if its config
    has no limit.

    With longrope, a sequence that is longer than the original length uses other RoPE frequencies, also for its first
    tokens. An index has keys for one set of frequencies. If the document fits the original length, a sequence must
    therefore not grow past that length. The same holds for Phi-3, whose cache transformers drops at that length.

    Args:
        document: number of tokens of the document.
    """
    positions, switch = positions_of(config), _switch(config.get_text_config())
    if switch is None or document > switch:
        return positions
    return switch if positions is None else min(positions, switch)


def stretchable(config: "PreTrainedConfig") -> bool:
    """Whether `RopeScaling` can give a model more positions."""
    try:
        _plain_rope(config.get_text_config())
    except UsageError:
        return False
    return True


def stretch_for(config: "PreTrainedConfig", tokens: int, scaling: str | None) -> str:
    """Return the option `--rope-scaling` that gives a model positions for a number of tokens.

    The result is empty if the config has no limit of positions, or if `RopeScaling` cannot stretch the model.

    Args:
        scaling: the RoPE scaling with which the config was already stretched; None if it was not.
    """
    positions = positions_of(config)
    if positions is None:
        return ""
    if scaling is not None:
        given = RopeScaling.parse(scaling)
        return f"--rope-scaling {given.kind}:{math.ceil(tokens * given.factor / positions)}"
    return f"--rope-scaling yarn:{math.ceil(tokens / positions)}" if stretchable(config) else ""


def _switch(config: "PreTrainedConfig") -> int | None:
    """Return the sequence length past which a cache of keys and values is invalid; None if there is no such length.

    Past this length RoPE frequencies change, or Phi-3 drops its cache.
    """
    # Phi-3 drops its cache when a sequence grows past this length, with any type of RoPE.
    switches = [getattr(config, "original_max_position_embeddings", None)]
    switches += [
        kind.get("original_max_position_embeddings")
        for kind in _kinds(getattr(config, "rope_parameters", None))
        if kind.get("rope_type") == "longrope" or "long_mscale" in kind
    ]
    return min((switch for switch in switches if switch is not None), default=None)


def _kinds(parameters: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return a config's RoPE parameters, followed by the RoPE parameters of each layer type, if there are any."""
    rope = parameters or {}
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


MOST_STRETCHED = 1000
"""Largest factor of a RoPE scaling."""


@dataclass(frozen=True)
class RopeScaling:
    """A RoPE scaling that gives a model `factor` times its positions.

    `yarn:F` is YaRN (arXiv 2309.00071) as transformers implements it, with the config's positions as the original
    length.

    `dynamic:F` is dynamic NTK scaling for one fixed length, which is F times the original length. It multiplies theta
    by `(F * F - F + 1) ** (D / (D - 2))`, where D is the number of rotated channels of a head. transformers' own
    `dynamic` type recomputes theta as a sequence grows, so keys of early and late chunks would be rotated differently.
    """

    kind: str
    factor: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `yarn:F` or `dynamic:F` with F above 1, at most `MOST_STRETCHED`. Raises UsageError for other texts."""
        kind, _, number = text.partition(":")
        try:
            factor = float(number)
        except ValueError:
            factor = math.nan
        if kind not in ("yarn", "dynamic") or not 1 < factor <= MOST_STRETCHED:
            raise UsageError(
                f"--rope-scaling {text}: give yarn:FACTOR or dynamic:FACTOR with a factor above 1 and at most "
                f"{MOST_STRETCHED:,}"
            )
        return cls(kind, factor)

    def stretch(self, config: "PreTrainedConfig") -> None:
        """Apply the scaling to a config in place, before the model is created.

        If layer types have their own RoPE parameters (Gemma 3), the parameters of full attention are changed. If layers
        have their own theta (Granite with sliding windows), all of these are changed.

        Raises:
            UsageError: the model has no rotary embedding, or its positions are scaled already.
        """
        config = config.get_text_config()
        rope = _plain_rope(config)
        positions = config.max_position_embeddings
        config.max_position_embeddings = int(positions * self.factor)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if self.kind == "yarn":
            if hasattr(config, "head_dim"):  # it may be None (Mixtral), with which transformers' YaRN fails
                config.head_dim = head_dim
            rope.update(rope_type="yarn", factor=self.factor, original_max_position_embeddings=positions)
            return
        rotated = int(head_dim * rope.get("partial_rotary_factor", 1.0))
        larger = (self.factor**2 - self.factor + 1) ** (rotated / (rotated - 2))
        rope["rope_theta"] *= larger
        if of_layers := getattr(config, "layer_rope_theta", None):
            config.layer_rope_theta = [theta * larger for theta in of_layers]  # 0 for a layer without RoPE


def _rotates(config: "PreTrainedConfig") -> bool:
    """Whether a model applies RoPE. Granite hybrid and Zamba 2 may have its parameters without applying it."""
    kind = config.position_embedding_type if hasattr(type(config), "position_embedding_type") else "rope"
    return kind == "rope" and bool(getattr(config, "use_mem_rope", True))


def _plain_rope(config: "PreTrainedConfig") -> dict[str, Any]:
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(entry, dict) for entry in rope.values()):
        rope = rope.get("full_attention") or {}
    positions = getattr(config, "max_position_embeddings", None)
    if "rope_theta" not in rope or not positions or not _rotates(config):
        raise UsageError(f"--rope-scaling: a {config.model_type} model has no rotary positions to stretch; {LEAVE_OUT}")
    if rope.get("rope_type", "default") != "default":
        raise UsageError(
            f"--rope-scaling: the model's positions are scaled already ({rope['rope_type']}, "
            f"{positions_of(config)} positions); {LEAVE_OUT}"
        )
    return rope

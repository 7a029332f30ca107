"""Keys and values in 8 bits: whole numbers from -127 to 127, with what they are multiplied by and added to.

Keys have a few channels of large values, often around a mean far from zero (KIVI, arXiv 2402.02750, section 3.2). So a
channel has an offset and a scale, which all tokens share, and a token has a scale, which all of its channels share.
Values have no such channels: theirs is a scale for each head and token. Unlike in KIVI no block of tokens shares
anything: a kernel reads rows in any order, each with 2 bytes beside it, and rows may be continued at any token.
docs/reference/eight-bits.md has what this and other forms lose.
"""

from collections.abc import Mapping

import torch

LARGEST = 127  # so that a number and its negative are both there
LARGEST_SCALE = 129 * 2.0**114  # the largest of bfloat16 that gives LARGEST a finite product in float32
PIECE = 8192  # tokens that are converted at a time, by way of float32
OF_TOKENS = ("keys", "values", "key_scales", "value_scales")
"""Names of the tensors [Hk, N, ...] that have something of each token."""
OF_CHANNELS = ("channel_scales", "channel_offsets")
"""Names of the tensors [Hk, D] that all keys share."""
SCALES = ("key_scales", "value_scales", *OF_CHANNELS)
"""Names of the tensors beside `keys` and `values`, all bfloat16: 2 bytes, with the range of float32."""
FORM = "int8 of tokens and channels"
"""What the tensors mean, in the recipe of their files: no build reuses files of an earlier form."""

Tensors = Mapping[str, torch.Tensor]


def quantise(keys: torch.Tensor, values: torch.Tensor, like: Tensors | None = None) -> dict[str, torch.Tensor]:
    """Keys and values [Hk, N, D], finite and of any floating dtype, in 8 bits, on their device.

    Each number is off by at most half its scale; a key's is its token's times its channel's. Needs the memory of the
    result and of PIECE tokens in float32.

    Args:
        like: the tensors of an earlier call whose channels these rows share because they continue its rows. A key
            outside the range of these channels makes its token's scale larger.

    Returns:
        keys, values [Hk, N, D] int8; key_scales, value_scales [Hk, N]; channel_scales, channel_offsets [Hk, D].
    """
    channels = _channels(keys) if like is None else {name: like[name].to(keys.device) for name in OF_CHANNELS}
    pieces = [
        _quantise_piece(*some, channels) for some in zip(keys.split(PIECE, 1), values.split(PIECE, 1), strict=True)
    ]
    return {name: torch.cat([piece[name] for piece in pieces], 1) for name in OF_TOKENS} | channels


def bounds(tensors: Tensors) -> dict[str, torch.Tensor]:
    """What must be finite of a file's tensors, by their names; nothing of one that is not in 8 bits. Of scales that is
    the largest product that they give, because kernels take them as they are."""
    found = {name: tensors[name] for name in SCALES if name in tensors}
    return {name: rows if name == "channel_offsets" else rows * LARGEST for name, rows in found.items()}


def row_bytes(channels: int) -> int:
    """Bytes of a token's keys or values of one head, with the scale of their own."""
    return channels + 2


def joined(first: Tensors, then: Tensors) -> dict[str, torch.Tensor]:
    """The tensors of `quantise` for tokens that follow one another, of which the later were made like the first."""
    of_tokens = {name: torch.cat([first[name].to(then[name].device), then[name]], 1) for name in OF_TOKENS}
    return of_tokens | {name: first[name].to(then[name].device) for name in OF_CHANNELS}


def first_tokens(tensors: Tensors, tokens: int) -> dict[str, torch.Tensor]:
    """The tensors of the first tokens alone."""
    return {name: rows[:, :tokens] if name in OF_TOKENS else rows for name, rows in tensors.items()}


def restore(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    channels: tuple[torch.Tensor, torch.Tensor] | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Rows [Hk, T, D] of a dtype that numbers [Hk, T, D] mean, with scales [Hk, T] of tokens, and with scales and
    offsets [Hk, D] of channels where they have them.

    Finite if scales and offsets are: what rounding took beyond the dtype's largest number becomes that.
    """
    # A product has 7 + 8 bits, and 8 more with a channel's scale, of the 24 that float32 has: it is exact, and the sum
    # is the only rounding, so that a GPU, which may multiply and add at once, gives the same bits as a CPU.
    # A scale that `quantise` never gives is cut: it would make an infinity, and that times a channel's zero no number.
    rows = numbers.float() * scales.float().clamp(-LARGEST_SCALE, LARGEST_SCALE)[..., None]
    if channels is not None:
        of_channels, offsets = (one.float()[:, None] for one in channels)
        rows.mul_(of_channels).add_(offsets)
    largest = torch.finfo(dtype).max
    return rows.clamp_(-largest, largest).to(dtype)


def _channels(keys: torch.Tensor) -> dict[str, torch.Tensor]:
    """Scales and offsets [Hk, D] of the channels of keys [Hk, N, D]."""
    # Without tokens there is no range; that of a single zero does as well.
    low, high = (keys if keys.shape[1] else keys.new_zeros(len(keys), 1, keys.shape[2])).aminmax(dim=1)
    low, high = low.float(), high.float()
    offsets = _bfloat16(low / 2 + high / 2)
    spread = torch.maximum(high - offsets.float(), offsets.float() - low)
    # The exponent 0.75 loses least, a quarter of a channel's size being left to the tokens' scales. It is made of
    # roots, which every device rounds correctly: a GPU stores what a CPU stores.
    root = spread.sqrt()
    scales = root * root.sqrt()
    # A channel that is the same in all tokens may differ in those that continue them, and then needs a scale.
    return {"channel_scales": _bfloat16(torch.where(scales == 0, 1.0, scales)), "channel_offsets": offsets}


def _quantise_piece(keys: torch.Tensor, values: torch.Tensor, channels: Tensors) -> dict[str, torch.Tensor]:
    """The tensors of OF_TOKENS for keys and values [Hk, T, D]."""
    scales, offsets = (channels[name].float()[:, None] for name in OF_CHANNELS)
    normalised, exact_values = (keys.float() - offsets).div_(_divisors(scales)), values.float()
    key_scales, value_scales = _scales(normalised), _scales(exact_values)
    return {
        "keys": _rounded(normalised, key_scales),
        "values": _rounded(exact_values, value_scales),
        "key_scales": key_scales,
        "value_scales": value_scales,
    }


def _scales(rows: torch.Tensor) -> torch.Tensor:
    """bfloat16 scales [Hk, T] with which the largest number of a row of [Hk, T, D] is LARGEST."""
    # A key far outside the range of the channels that it is given may have become infinite.
    return (rows.abs().amax(2) / LARGEST).clamp_(max=LARGEST_SCALE).to(torch.bfloat16)


def _bfloat16(rows: torch.Tensor) -> torch.Tensor:
    largest = torch.finfo(torch.bfloat16).max
    return rows.clamp(-largest, largest).to(torch.bfloat16)


def _rounded(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows [Hk, T, D] as numbers, by scales [Hk, T]."""
    return (rows / _divisors(scales.float())[..., None]).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)


def _divisors(scales: torch.Tensor) -> torch.Tensor:
    # Where the scale is 0 all numbers are 0, or too small for any scale.
    return torch.where(scales == 0, 1.0, scales)

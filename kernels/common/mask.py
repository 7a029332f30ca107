"""Detection of the mask that transformers would give a layer: causal, or causal within a sliding window.

transformers describes a mask as a function of positions. An attention implementation makes the mask from this function
(`AttentionMaskInterface`). Our implementation makes no mask, but evaluates the function to find out whether the mask
is causal within a window. Then it passes the layer a marker, a tensor of one element that represents this window in the
layer's attention call.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

MOST_POSITIONS = 2**21
"""Maximum number of positions at which a mask function is evaluated, unless a sequence is longer."""
MEASURED_ELEMENTS = 2**22
"""Approximate maximum number of elements of a mask that are evaluated; LEAST_ROWS rows of any length are allowed."""
LEAST_ROWS = 24

MaskFunction = Callable[..., torch.Tensor]
Window = int | None
"""Number of keys that a query attends to, ending with its own key; None for all keys up to its own."""
Measured = Window | str
"""A window, or a description of a mask that our attention does not support.

A model may make masks that no layer uses. Therefore such a mask is refused only when a layer uses it.
"""


class UnsupportedAttentionError(Exception):
    """The model attends in a way that our attention does not support; the message has the `reason` and a remedy."""

    def __init__(self, way: str):
        self.reason = f"the model's attention {way}, which an index cannot reproduce"
        super().__init__(f"{self.reason}; choose a model with causal attention, over all tokens or a sliding window")


_windows: dict[object, Measured] = {}
"""Windows by a mask function's code and constants, and by the number of positions at which it was evaluated."""
_markers: dict[tuple[torch.device, torch.dtype, Measured], torch.Tensor] = {}
_marked: dict[tuple[torch.device, int], Measured] = {}
"""Windows by a marker's device and address; views of a marker share its address."""


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    *,
    mask_function: MaskFunction,
    config: Any = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **_: Any,
) -> torch.Tensor:
    """Return the marker [1, 1, 1, 1] of a mask; transformers calls this once per forward pass and kind of layer.

    Sequences are never padded here, and so the padding mask is all ones and is ignored. A mask function that depends
    only on constants is evaluated once, on the CPU, for some queries and for the keys of all positions of the model's
    config (at most `MOST_POSITIONS`), and again only for a longer sequence. Any other mask function may change between
    forward passes, for example with a tensor. It is evaluated in each pass, for some queries and for the keys of the
    pass, which synchronises with the device.

    Args:
        mask_function: maps the indices of batch, head, query and key to whether the query attends to the key.
        local_size: the sliding window or chunk size that transformers passes with the function.
    """
    constants = _constants(mask_function)
    # A pass over several sequences may have more queries in all than one sequence has keys.
    end = kv_offset + kv_length
    if constants is None:
        stop = min(q_offset + q_length, end)
        queries = _some(q_offset, stop, stop - 1)
        window = _measure(mask_function, queries, kv_offset, kv_length, use_vmap=use_vmap, device=device)
    else:
        window = _window(constants, mask_function, config, local_size, end, use_vmap=use_vmap)
    return _marker(torch.device(device), dtype, window)


def _window(
    constants: tuple[object, ...],
    function: MaskFunction,
    config: Any,
    local_size: int | None,
    end: int,
    *,
    use_vmap: bool,
) -> Measured:
    """Return the window of a mask function of constants, or a description of an unsupported mask.

    The function is evaluated over the positions of the model's config, or over more if the sequence, which has `end`
    tokens, is longer. The result is kept in `_windows`.
    """
    known = getattr(config, "max_position_embeddings", None) or 0
    positions = max(min(max(known, 2 * (local_size or 0), 64), MOST_POSITIONS), 2 ** (end - 1).bit_length())
    if (constants, positions) not in _windows:
        queries = _some(0, positions, positions - 1)
        found = _measure(function, queries, 0, positions, use_vmap=use_vmap, device="cpu")
        _windows[constants, positions] = found
    return _unless_all(_windows[constants, positions], known, end)


def _unless_all(window: Measured, known: int, end: int) -> Measured:
    """Return None for a window that covers the `known` positions of the model's config, because it hides no key.

    If the sequence of `end` tokens is longer than such a window, return a description of the unsupported mask.
    Smaller windows and descriptions are returned unchanged. If `known` is 0, because the config has no number of
    positions, every window is returned unchanged.
    """
    if window is None or isinstance(window, str) or not known or window < known:
        return window
    if end > window:
        return (
            f"applies a sliding window of {window} tokens to a sequence longer than "
            f"max_position_embeddings ({known} in the config)"
        )
    return None


def window_of(mask: torch.Tensor) -> Window:
    """Return the window that a layer's marker represents.

    Raises:
        UnsupportedAttentionError: the mask is neither causal nor causal within a sliding window, or the tensor is
            neither a marker of `make_mask` nor a view of one.
    """
    try:
        window = _marked[mask.device, mask.untyped_storage().data_ptr()]
    except KeyError:
        raise UnsupportedAttentionError("has a mask that the model itself makes or changes") from None
    if isinstance(window, str):
        raise UnsupportedAttentionError(window)
    return window


def _marker(device: torch.device, dtype: torch.dtype, window: Measured) -> torch.Tensor:
    found = _markers.get((device, dtype, window))
    if found is None:
        # A marker is NaN, so that any result that a model computes from it is visibly wrong. `_markers` keeps it alive,
        # because its address identifies the window.
        with torch.inference_mode(False):
            found = torch.full((1, 1, 1, 1), torch.nan, dtype=dtype, device=device)
        _marked[found.device, found.untyped_storage().data_ptr()] = window
        _markers[device, dtype, window] = found
    return found


def _constants(function: object) -> tuple[object, ...] | None:
    """Return a key that identifies a mask function: its code, and the constants in its closure and defaults.

    Functions among these values are replaced by their own keys. Return None if `function` is no Python function, or if
    one of the values is not a constant, such as a tensor.
    """
    if not isinstance(function, FunctionType):
        return None
    found: list[object] = [function.__code__]
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    values += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    while values:
        value = values.pop(0)
        if isinstance(value, tuple | list):
            values[:0] = value
            found.append(len(value))
        elif isinstance(value, FunctionType):
            inner = _constants(value)
            if inner is None:
                return None
            found.append(inner)
        elif value is None or isinstance(value, int | float | str):
            found.append(value)
        else:
            return None
    return tuple(found)


def _some(first: int, last: int, *further: int) -> list[int]:
    """Choose the query positions, from `first` up to, but not including, `last`, at which a mask is checked.

    The result has the first position, the positions 4, 8, 16, ... after it with their neighbours, and 13 nearly evenly
    spaced positions. It also has each `further` position that is in the range.
    """
    powers = [first + 2**power + step for power in range(2, (last - first).bit_length()) for step in (-1, 0, 1)]
    between = [first + (last - first) * part // 13 + part for part in range(13)]
    return sorted({number for number in (first, *powers, *between, *further) if first <= number < last})


def _measure(
    function: MaskFunction, queries: list[int], first: int, keys: int, *, use_vmap: bool, device: torch.device | str
) -> Measured:
    """Determine the window of a mask function from the mask rows of some queries, over `keys` keys from `first` on.

    Return a description if the mask is neither causal nor causal within one sliding window.
    """
    from transformers import AttentionMaskInterface  # commands parse their options without transformers

    row = AttentionMaskInterface()["sdpa"]
    numbers = torch.arange(first, first + keys, device=device)

    def seen_by(query: int) -> torch.Tensor:
        made: torch.Tensor = row(
            batch_size=1,
            q_length=1,
            kv_length=keys,
            q_offset=query,
            kv_offset=first,
            mask_function=function,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        return made.reshape(keys)

    last = queries[-1]
    window = int(seen_by(last).sum())
    if not window:
        return "hides a token from itself"
    sizes = [window, window - 1, window + 1, 2 * window - 1, 2 * window]
    for query in _thinned(queries, keys) + [size for size in sizes if queries[0] <= size <= last]:
        if not torch.equal(seen_by(query), (numbers <= query) & (numbers > query - window)):
            return "is neither causal nor causal within one sliding window"
    return None if window == last - first + 1 else window


def _thinned(queries: list[int], keys: int) -> list[int]:
    most = max(LEAST_ROWS, MEASURED_ELEMENTS // keys)
    return queries[:: -(-len(queries) // most)]

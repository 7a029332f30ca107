"""The device that a model runs on, by the name that a user gives it."""

import torch

from sparsekv.formats.errors import UsageError
from sparsekv.formats.suggestions import choose_one


def choose_device(text: str) -> torch.device:
    """A device by its name, a GPU with its number; `auto` is the GPU if there is one.

    Raises:
        UsageError: an unknown or missing device.
    """
    if text == "auto":
        text = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(text)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {text}: {choose_one(text, ('auto', 'cpu', 'cuda', 'cuda:N'))}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"--device {text}: this machine (or this build of torch) has {torch.cuda.device_count()} CUDA devices; "
            "use --device cpu or auto"
        )
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device

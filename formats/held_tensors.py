"""Tensors that wait to be written to disk, within a bound on their memory."""

import threading
from collections.abc import Mapping

import torch


class HeldTensors:
    """The tensors of files that threads write, by the file's name, until they are written.

    Args:
        most: bytes that those may have together for which `add` waits; one larger file may be there alone. The others
            are not counted: their memory is needed anyway.
    """

    def __init__(self, most: int):
        self._most = most
        self._held: dict[str, Mapping[str, torch.Tensor]] = {}
        self._counted: dict[str, int] = {}
        # Always enter this lock, never the condition: the condition's __enter__ is Python code, and Ctrl-C inside it
        # would leave the lock held for ever.
        self._guard = threading.RLock()
        self._changed = threading.Condition(self._guard)

    def add(self, name: str, tensors: Mapping[str, torch.Tensor], *, wait: bool) -> None:
        """Hold a file's tensors; with `wait` once there is room for them."""
        with self._guard:
            if wait:
                size = sum(tensor.nbytes for tensor in tensors.values())
                self._changed.wait_for(lambda: not self._counted or sum(self._counted.values()) + size <= self._most)
                self._counted[name] = size
            self._held[name] = tensors

    def get(self, name: str) -> Mapping[str, torch.Tensor] | None:
        """A file's tensors; None once they are written."""
        with self._guard:
            return self._held.get(name)

    def drop(self, name: str) -> None:
        """Let go of a file's tensors, if any are held."""
        with self._guard:
            self._held.pop(name, None)
            self._counted.pop(name, None)
            self._changed.notify_all()

"""What an evaluation asks of whoever builds its indices."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from sparsekv.formats.documents.prompt import FixedPrompt

Progress = Callable[[str, int, int], None]
"""Called with a stage, how many of its steps are done, and how many it has."""


class Builder(Protocol):
    """Builds an index of each context; handed in, because answering needs nothing else of building."""

    @property
    def prefills(self) -> Iterable[str]:
        """The ways to prefill, by name."""

    @property
    def parameters(self) -> Mapping[str, dict[str, Any]]:
        """What each method's tensors are built with, for those that have tensors."""

    @property
    def queries(self) -> int:
        """How many of a document's queries the methods are made of at most."""

    def decides(self, prefill: str) -> dict[str, Any]:
        """What else decides an index, beside its prompt and the model."""

    def sample_of(self, name: str) -> dict[str, int]:
        """What else decides a method's tensors: of how many queries they are made, where another method wants more."""

    def build(self, prompt: FixedPrompt, prefill: str, folder: Path, progress: Progress) -> None:
        """Build the index of a prompt, or resume it; errors are those of building."""

"""Counts of what a rank does in a build."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sparsekv.formats.index import growing_file
from sparsekv.formats.index.reader import WholeFile
from sparsekv.formats.index.writer import PartWriter
from sparsekv.indexing.capture.team import LayerWork


@dataclass
class Deeds:
    """Counts of this process's work in a build.

    `layers` counts the layers that it has indexed, `sums` the checksums of shared files that it has computed, and
    `rows` how often it has written rows to a file that another process began.
    """

    done: Counter[str] = field(default_factory=Counter)

    def note_all(self) -> None:
        """Count from now on, until the process ends."""
        self._note(LayerWork, "build", "layers")
        self._note(WholeFile, "sha256", "sums")
        self._note(growing_file, "hash_descriptor", "sums")
        joined = PartWriter.put

        def put(writer: PartWriter, name: str, *given: Any) -> None:
            self.done["rows"] += name in writer._files
            joined(writer, name, *given)

        PartWriter.put = put  # type: ignore[method-assign]

    def _note(self, where: Any, name: str, what: str) -> None:
        does: Callable[..., Any] = getattr(where, name)

        def noted(*given: Any) -> Any:
            self.done[what] += 1
            return does(*given)

        setattr(where, name, noted)

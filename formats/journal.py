"""The journal of an unfinished build: which files are whole, and every path that the build has written to."""

import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sparsekv.formats.folder import Folder
from sparsekv.formats.record import FileName
from sparsekv.formats.schema import FileRecord

JOURNAL = "unfinished.json"
_MOST = 64 << 20

_FILES = TypeAdapter(dict[FileName, FileRecord])
_PATHS = TypeAdapter(set[FileName])


@dataclass
class Journal:
    """Records of whole files by logical name; every path that the index has or had, or that a build began to write; and
    notes, small JSON values that a build stores for when it is resumed."""

    files: dict[str, FileRecord] = field(default_factory=dict)
    paths: set[str] = field(default_factory=set)
    notes: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The journal as it is stored on disk."""
        files = {name: record.model_dump() for name, record in self.files.items()}
        return json.dumps({"files": files, "paths": sorted(self.paths), "notes": self.notes}).encode()


def read_journal(folder: Folder) -> Journal | None:
    """The journal in a folder; None where there is none that this version can read."""
    try:
        stored = json.loads(folder.read(JOURNAL, _MOST))
        files = _FILES.validate_python(stored["files"])
        # An older version's journal has no paths: the files that it recorded are all that it wrote.
        paths = _PATHS.validate_python(stored.get("paths", []))
        notes = dict(stored["notes"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, ValidationError):
        return None
    return Journal(files, paths | {record.path for record in files.values()}, notes)


class KeptJournal:
    """The journal of a build under way, on disk after every change; threads may change it.

    What changes it raises OSError where it cannot be written.

    Args:
        folder: it resumes the journal that an interrupted build left there.
        forget: of that one it knows the paths alone.
    """

    def __init__(self, folder: Folder, *, forget: bool):
        earlier = read_journal(folder) or Journal()
        self._folder, self._journal = folder, Journal(paths=earlier.paths) if forget else earlier
        self._guard = threading.RLock()

    @property
    def files(self) -> dict[str, FileRecord]:
        return self._journal.files

    @property
    def paths(self) -> set[str]:
        return self._journal.paths

    @property
    def notes(self) -> dict[str, Any]:
        return self._journal.notes

    def know(self, paths: Iterable[str]) -> None:
        """Know more paths when it is written next."""
        with self._guard:
            self._journal.paths.update(paths)

    def name(self, path: str) -> str:
        """A path, once the journal on disk has it."""
        with self._guard:
            if path not in self._journal.paths:
                self._journal.paths.add(path)
                self.write()
        return path

    def reuse(self, name: str, record: FileRecord) -> None:
        """Have a whole file of an earlier build in it when it is written next."""
        with self._guard:
            self._journal.files[name] = record

    def add(self, name: str, record: FileRecord) -> None:
        """Have a file in it that is whole."""
        with self._guard:
            self._journal.files[name] = record
            self.write()

    def note(self, name: str, value: Any) -> None:
        """Have a note in it."""
        with self._guard:
            self._journal.notes[name] = value
            self.write()

    def write(self) -> None:
        """Write all that is known."""
        with self._guard:
            self._folder.write(JOURNAL, [self._journal.to_bytes()])

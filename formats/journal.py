"""The journal of an unfinished build: which files are whole, and every path that the build has written to."""

import json
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sparsekv.formats.folder import Folder
from sparsekv.formats.schema import FileName, FileRecord

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

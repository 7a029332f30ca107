"""Which index a command means."""

from pathlib import Path

from sparsekv.formats.errors import UsageError
from sparsekv.formats.reader import Artifact


def open_artifact(given: Path | None) -> Artifact:
    """The index that was named, or the only `*.skv` of the current folder.

    Raises:
        UsageError: none was named, and there is none or more than one.
        ArtifactError: it is unfinished, damaged or newer than this version.
    """
    if given is not None:
        return Artifact(given)
    found = sorted(path for path in Path().glob("*.skv") if path.is_dir())
    if not found:
        raise UsageError("no index in this folder: name one with --index, or make one with `sparsekv build-index DOC`")
    if len(found) > 1:
        raise UsageError(f"several indices in this folder ({', '.join(map(str, found))}): name one with --index")
    return Artifact(found[0])

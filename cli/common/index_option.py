"""Which index a command means."""

import os
import stat
from pathlib import Path

from sparsekv.formats.errors import UsageError
from sparsekv.formats.reader import Artifact


def open_artifact(given: Path | None, *, thorough: bool = False) -> Artifact:
    """The index that was named, or the only `*.skv` of the current folder.

    Args:
        thorough: recheck every file that is read, as `Artifact` says.

    Raises:
        UsageError: none was named, and there is none or more than one; what was named cannot be a folder.
        ArtifactError: it is unfinished, damaged or newer than this version.
    """
    if given is not None:
        _refuse_other_than_folder(given)
        return Artifact(given, thorough=thorough)
    found = sorted(path for path in Path().glob("*.skv") if path.is_dir())
    if not found:
        raise UsageError("no index in this folder: name one with --index, or make one with `sparsekv build-index DOC`")
    if len(found) > 1:
        raise UsageError(f"several indices in this folder ({', '.join(map(str, found))}): name one with --index")
    return Artifact(found[0], thorough=thorough)


def _refuse_other_than_folder(given: Path) -> None:
    """What is not there is told by who opens it, as what cannot be read."""
    try:
        mode = os.stat(given).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"--index {given}: {reason}; name the folder that `sparsekv build-index` printed") from None
    if not stat.S_ISDIR(mode):
        raise UsageError(
            f"--index {given} is no folder, and an index is one; name the folder that `sparsekv build-index` printed"
        )

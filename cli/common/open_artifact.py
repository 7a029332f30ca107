"""Find and open the index that a command uses."""

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from sparsekv.formats.errors import UsageError, command, first_build_hint, no_folder, reason_of

if TYPE_CHECKING:  # the module imports torch, which the help of `serve` does not need
    from sparsekv.formats.index.reader import Artifact


def open_artifact(given: Path | None, *, thorough: bool = False, called: str = "--index") -> "Artifact":
    """Open the index that the user named, or the only `*.skv` of the current folder.

    Args:
        thorough: verify every file that is read, see `Artifact`.
        called: the option or argument that names the index, for messages.

    Raises:
        UsageError: no index is named and the folder has none or several, or the named path is no folder or cannot be
            looked up.
        MissingIndexError: the named path does not exist, or is a folder without an index.
        ArtifactError: the index is unfinished, damaged or newer than this version.
    """
    if given is not None:
        _refuse_other_than_folder(given, called)
        return _opened(given, thorough)
    found = sorted(path for path in Path().glob("*.skv") if path.is_dir())
    by_argument = called == "INDEX"
    if not found:
        how = "as an argument, such as `sparsekv serve manual.skv`" if by_argument else "with --index"
        raise UsageError(f"no index in this folder: name one {how}, or {first_build_hint()}")
    if len(found) > 1:
        names = ", ".join(map(str, found))
        how = f"as an argument: {command('serve', found[0])}" if by_argument else "with --index or SPARSEKV_INDEX"
        raise UsageError(f"several indices in this folder ({names}): name one {how}")
    return _opened(found[0], thorough)


def _opened(folder: Path, thorough: bool) -> "Artifact":
    from sparsekv.formats.index.reader import Artifact
    from sparsekv.runtime.decoding.kept import open_kept

    kept = None if thorough else open_kept(folder)
    return kept or Artifact(folder, thorough=thorough)


def _refuse_other_than_folder(given: Path, called: str) -> None:
    """Raise UsageError if the path is no folder or cannot be looked up.

    A path that does not exist is accepted, because `Artifact` reports it.
    """
    try:
        mode = os.stat(given).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{called} {given}: {reason_of(error)}; name the folder that build-index printed") from None
    if not stat.S_ISDIR(mode):
        raise UsageError(f"{called} {given} {no_folder(given)}")

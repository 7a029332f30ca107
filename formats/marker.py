"""The marker file that identifies a folder as an index of sparsekv, finished or not."""

from sparsekv.formats.folder import Folder

MARKER = ".sparsekv"
_MARK = b"An index of sparsekv lies in this folder: builds replace and remove the files that its manifest names.\n"


def is_marked(folder: Folder) -> bool:
    """Whether a folder has the marker of an index, finished or not."""
    try:
        return folder.read(MARKER, len(_MARK)) == _MARK
    except OSError:
        return False


def mark(folder: Folder) -> None:
    """Write the marker into a folder if it is missing. Raises OSError where it cannot be written."""
    if not is_marked(folder):
        folder.write(MARKER, [_MARK])

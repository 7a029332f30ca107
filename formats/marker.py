"""The file by which a folder says that it is an index of ours, finished or not."""

from sparsekv.formats.folder import Folder

MARKER = ".sparsekv"
_MARK = b"An index of sparsekv lies in this folder: builds replace and remove the files that its manifest names.\n"


def is_marked(folder: Folder) -> bool:
    """Whether a folder says of itself that it is an index, or the beginning of one."""
    try:
        return folder.read(MARKER, len(_MARK)) == _MARK
    except OSError:
        return False


def mark(folder: Folder) -> None:
    """Let a folder say that it is an index. OSError where it cannot be written."""
    if not is_marked(folder):
        folder.write(MARKER, [_MARK])

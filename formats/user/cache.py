"""The user's cache folder, its small files, and the list of models that the user has named."""

import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from tempfile import gettempdir, mkdtemp, mkstemp

import platformdirs

from sparsekv.formats.errors import SparsekvError, reason_of


def give_home() -> None:
    """Set HOME to a folder if this user has no home, such as an unknown uid in a container.

    Without HOME, libraries would write their caches to a folder named `~` in the current folder. HOME becomes a folder
    that only this user may write, in the system's folder for temporary files. Its name is the same each time. If a file
    has that name, or a folder that another user owns or may write, HOME becomes a new folder.

    Raises:
        SparsekvError: the folder cannot be created.
    """
    if os.path.isabs(os.path.expanduser("~")):
        return
    try:
        folder = Path(gettempdir()) / f"sparsekv-{os.getuid()}"
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
        # Another user may have created this folder, to read our files or to have us read theirs.
        own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
        os.environ["HOME"] = str(folder) if own else mkdtemp(prefix="sparsekv-")
    except OSError as error:
        raise SparsekvError(
            f"this user has no home folder, and none can be made: {reason_of(error)}; set HOME"
        ) from None


def cache_root() -> Path:
    """Return the folder of $SPARSEKV_CACHE, or else the user's cache folder.

    In the second case `give_home` is called first, and its errors are raised.
    """
    root = os.environ.get("SPARSEKV_CACHE")
    if not root:
        give_home()
        return platformdirs.user_cache_path("sparsekv")
    with suppress(RuntimeError):  # ~user of an unknown user
        return Path(root).expanduser().absolute()
    return Path(root).absolute()


def read_small(path: Path) -> str:
    """Read a file's text; empty if it is not a file or cannot be read."""
    try:
        return path.read_text() if path.is_file() else ""
    except (OSError, ValueError):
        return ""


def replace_small(path: Path, text: str) -> None:
    """Replace a file atomically. If writing fails, the old file stays, and the error is ignored."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        number, name = mkstemp(prefix=f"{path.name}.", dir=path.parent)
        try:
            with os.fdopen(number, "w") as file:
                file.write(text)
            os.chmod(name, 0o644)
            os.replace(name, path)
        except OSError:
            os.unlink(name)


_FILE = "named_models.json"


def named_models() -> list[str]:
    """Read the list of models that the user has named: hub ids, and absolute paths of folders and GGUF files.

    A missing or damaged list counts as empty.
    """
    try:
        found = json.loads(read_small(cache_root() / _FILE) or "[]")
    except (ValueError, RecursionError):
        return []
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def keep_named(names: list[str]) -> None:
    """Replace the list of models that the user has named. If writing fails, the old list stays."""
    replace_small(cache_root() / _FILE, json.dumps(sorted(set(names)), indent=1) + "\n")

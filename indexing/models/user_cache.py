"""The folder of what this tool keeps between runs, and small files in it."""

import os
from contextlib import suppress
from pathlib import Path
from tempfile import mkstemp

import platformdirs


def cache_root() -> Path:
    """$SPARSEKV_CACHE, or the user's cache folder."""
    root = os.environ.get("SPARSEKV_CACHE")
    if not root:
        return platformdirs.user_cache_path("sparsekv")
    with suppress(RuntimeError):  # ~ of nobody
        return Path(root).expanduser().absolute()
    return Path(root).absolute()


def read_small(path: Path) -> str:
    """A file's text; nothing where it is no file, or cannot be read."""
    try:
        return path.read_text() if path.is_file() else ""
    except (OSError, ValueError):
        return ""


def replace_small(path: Path, text: str) -> None:
    """Replace a file at once; what cannot be written stays as it was, for it is only there to save work."""
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

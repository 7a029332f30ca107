"""The cache folder that is kept between runs, and reading and writing of small files in it."""

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
    with suppress(RuntimeError):  # ~user of an unknown user
        return Path(root).expanduser().absolute()
    return Path(root).absolute()


def read_small(path: Path) -> str:
    """A file's text; empty if it is not a file or cannot be read."""
    try:
        return path.read_text() if path.is_file() else ""
    except (OSError, ValueError):
        return ""


def replace_small(path: Path, text: str) -> None:
    """Replace a file atomically; if that fails the old file stays and nothing is raised, as a cache only saves work."""
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

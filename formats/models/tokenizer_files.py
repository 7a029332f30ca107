"""A hash of the files that a tokenizer is loaded from, which tells that two are the same without serialising them."""

from pathlib import Path

from sparsekv.formats.checksums import hash_file, hash_json

KINDS = (".json", ".jinja", ".txt", ".model", ".tiktoken")
"""Ends of the names of files that tokenizers are made of."""

OWN = "sha256.json"
"""What the embedded model's folder has beside it, which tells of one copy of the files."""

TEMPLATES = "additional_chat_templates"
"""The folder in which transformers finds a tokenizer's other templates."""

MOST = 64 << 20
"""Bytes of all of them: a folder with more holds other things, and hashing it takes longer than serialising does."""

FORM = 1
"""To be raised when tokenizers are loaded from their files in another way."""

Look = list[tuple[str, int, int, int]]
"""Name, size, time and inode of each file."""


class TokenizerFiles:
    """The files of a model's folder as they are when this is made, which is before a tokenizer is loaded from them."""

    def __init__(self, folder: Path):
        self._folder, self._seen = folder, _look(folder)

    def hash(self) -> str | None:
        """sha256 of the files and of the versions of the libraries that read them; to be called once these have.

        Returns:
            None where a file cannot be read, where they have more than MOST bytes, or where they have changed.
        """
        import tokenizers
        import transformers

        if self._seen is None or sum(size for _, size, _, _ in self._seen) > MOST:
            return None
        try:
            found = {name: hash_file(self._folder / name) for name, *_ in self._seen}
        except OSError:
            return None
        if _look(self._folder) != self._seen:
            return None
        return hash_json([FORM, found, transformers.__version__, tokenizers.__version__])


def _look(folder: Path) -> Look | None:
    """The files as they are; None where there are none, or they cannot be listed."""
    try:
        paths = [path for one in (folder, folder / TEMPLATES) if one.is_dir() for path in one.iterdir()]
        named = {str(path.relative_to(folder)): path.stat() for path in sorted(paths) if _counts(path)}
    except OSError:
        return None
    return [(name, found.st_size, found.st_mtime_ns, found.st_ino) for name, found in named.items()] or None


def _counts(path: Path) -> bool:
    return path.suffix in KINDS and path.name != OWN and path.is_file()

"""Format commands about an index's document that messages show, ready to paste into a shell."""

from pathlib import Path

from sparsekv.formats.checksums import hash_bytes
from sparsekv.formats.documents.document import decode_text
from sparsekv.formats.errors import TEXT_ENDINGS, UsageError, beside, command
from sparsekv.formats.index.schema import Manifest, TuneTarget
from sparsekv.formats.models.find import EMBEDDED, is_named

_MOST_HASHED = 64 << 20
_EVALUATED, _LEAST_EVALUATED = 4096, 512
"""Default number of tokens of a context of `eval`, and the smallest number that a hint suggests."""


def document_of(folder: Path, manifest: Manifest) -> Path | None:
    """Find the file with the document of an index, next to the index or in the current folder, by its checksum.

    Only texts in UTF-8, UTF-16 or UTF-32 of at most 64 MiB are searched. Returns None if no text has the checksum, for
    example because the document was edited or text was appended to the index.
    """
    texts = [path for ending in TEXT_ENDINGS for path in Path().glob(ending)]
    for path in dict.fromkeys([*beside(folder), *texts]):
        try:
            if path.is_file() and path.stat().st_size <= _MOST_HASHED:
                text = decode_text(path.read_bytes(), str(path))
                if hash_bytes(text.encode()) == manifest.prompt.text_sha256:
                    return path
        except (OSError, UsageError):
            continue
    return None


def eval_hint(folder: Path, manifest: Manifest, *chosen: str) -> str:
    """Format the `eval` command that measures how many answers about an index's document are right.

    The command has the options `chosen`.

    The command is `eval --help`, followed by the reason, if the document is not found, the user never named the index's
    model, or the text is too short.
    """
    text, tokens = document_of(folder, manifest), manifest.split.tokens
    whole = manifest.prompt.max_tokens is None
    if text is None or not is_named(manifest.model.id):
        why = "no file here has the text as it is indexed" if text is None else "name the model with --model"
        return f"{command('eval', '--help')} ({why})"
    most = tokens // 2 if whole else manifest.prompt.max_tokens or 0
    if most < _LEAST_EVALUATED:
        return f"{command('eval', '--help')} (this text is too short)"
    options = [*chosen] if manifest.model.id == EMBEDDED else [*chosen, "--model", manifest.model.id]
    if most < _EVALUATED and "--length" not in chosen:
        options += ["--length", str(most)]
    if manifest.kv_storage is not None and "--kv-dtype" not in chosen:
        options += ["--kv-dtype", manifest.kv_storage.dtype]
    return command("eval", text, *options)


def tune_hint(folder: Path, target: TuneTarget) -> str:
    """Format the `tune` command that searches again for a default setting, with the same target and methods."""
    # Numbers are written exactly: a share of 1.0 is all tokens, and 1 would be one token.
    of = [] if target.of is None else ["--of", str(target.of)]
    among = (part for name in target.methods for part in ("--method", name))
    return command("tune", "--index", folder, f"--target-{target.measure}", str(target.value), *of, *among)

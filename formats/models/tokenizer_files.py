"""A hash of the files that a tokenizer was loaded from, which tells that two are the same without serialising them."""

from pathlib import Path

from sparsekv.formats.checksums import hash_file, hash_json

WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".lock")
"""Ends of the names of files that no tokenizer is made of, of which some are large."""

OWN = "sha256.json"
"""What the embedded model's folder has beside it, which tells of one copy of the files."""

TEMPLATES = "additional_chat_templates"
"""The folder in which transformers finds a tokenizer's other templates."""

LARGEST = 64 << 20
"""Bytes: a file beyond is no tokenizer's, and to hash it would take longer than to serialise the tokenizer."""


def hash_tokenizer_files(folder: Path) -> str | None:
    """sha256 of a model folder's files but its weights, and of the versions of the libraries that read them.

    Returns:
        None where a file cannot be read, or is larger than LARGEST: the tokenizer itself tells what it is then.
    """
    import tokenizers
    import transformers

    try:
        there = [*folder.iterdir(), *(folder / TEMPLATES).glob("*")]
        files = sorted(path for path in there if path.suffix not in WEIGHTS and path.name != OWN and path.is_file())
        if any(path.stat().st_size > LARGEST for path in files):
            return None
        found = {str(path.relative_to(folder)): hash_file(path) for path in files}
    except OSError:
        return None
    return hash_json([found, transformers.__version__, tokenizers.__version__])

"""Program that loads the embedded model with too little memory for its weights."""

import re
import resource
from pathlib import Path

import accelerate  # noqa: F401  # which loading would import beyond the limit

from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.models.load import load_model, load_tokenizer


def check_weights_are_not_blamed(name: str) -> None:
    """Check the error with 200 MiB of memory beyond the imports and the tokenizer."""
    load_tokenizer(name)
    size = int(re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]
    resource.setrlimit(resource.RLIMIT_AS, (size + 200 * 2**20,) * 2)
    try:
        load_model(name, device="cpu", dtype="float32")
    except SparsekvError as error:
        told = str(error)
    assert told == (
        f"not enough memory for model '{name}' in float32 on cpu; free some, or use --dtype bfloat16 or a smaller model"
    )

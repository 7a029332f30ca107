"""Sparse-attention indices of a long, fixed prompt: open an index and ask it questions.

    import sparsekv

    index = sparsekv.open_index("manual.skv")
    answer = index.ask("How is it installed?", sparsekv.Sampling(max_new_tokens=20), budget="5%")

Names are imported when they are first used, so that `import sparsekv` does not import torch, which takes a second.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsekv.formats.errors import ArtifactError, IdentityError, MissingIndexError, SparsekvError, UsageError
    from sparsekv.runtime.api import Index, open_index
    from sparsekv.runtime.decoding.answer import Answer, Sampling
    from sparsekv.runtime.decoding.session import Session
    from sparsekv.runtime.selection.interface import methods

    __version__: str

__all__ = [
    "Answer",
    "ArtifactError",
    "IdentityError",
    "Index",
    "MissingIndexError",
    "Sampling",
    "Session",
    "SparsekvError",
    "UsageError",
    "__version__",
    "methods",
    "open_index",
]
_MODULES = {
    "Answer": "runtime.decoding.answer",
    "ArtifactError": "formats.errors",
    "IdentityError": "formats.errors",
    "Index": "runtime.api",
    "MissingIndexError": "formats.errors",
    "Sampling": "runtime.decoding.answer",
    "Session": "runtime.decoding.session",
    "SparsekvError": "formats.errors",
    "UsageError": "formats.errors",
    "methods": "runtime.selection.interface",
    "open_index": "runtime.api",
}


if not TYPE_CHECKING:  # with __getattr__, a type checker would accept any name

    def __getattr__(name: str) -> Any:
        """Import a public name from its module when it is first used (PEP 562)."""
        if name == "__version__":
            from importlib.metadata import version

            return version("sparsekv")
        if name in _MODULES:
            return getattr(import_module(f"sparsekv.{_MODULES[name]}"), name)
        raise AttributeError(f"module 'sparsekv' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

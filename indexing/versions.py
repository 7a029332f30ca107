"""Versions that a manifest records of what built it."""

import platform

import torch
import transformers


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that decide an index's numbers."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }

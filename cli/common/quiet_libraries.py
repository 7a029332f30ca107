"""Warnings of libraries, which a person can do nothing about, and which name files of theirs."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_libraries(*, debug: bool) -> Iterator[None]:
    """Keeps them off the screen while it lasts, unless a person wants to see everything."""
    if debug:
        yield
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    shown, level = warnings.showwarning, logging.root.manager.disable
    warnings.showwarning = lambda *told, **more: None
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        warnings.showwarning = shown
        logging.disable(level)

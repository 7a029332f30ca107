"""Silence warnings of libraries, about which the user can do nothing."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_libraries(*, debug: bool) -> Iterator[None]:
    """Context manager that hides libraries' warnings and log records; with `debug` it hides nothing."""
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

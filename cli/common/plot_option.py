"""Check that a plot can be written, before anything is measured."""

import os
from pathlib import Path

from sparsekv.formats.errors import UsageError


def refuse_unwritable_plot(plot: Path | None) -> None:
    """Raise UsageError for a plot whose folder is missing, or whose file name or ending is not possible."""
    if plot is None:
        return
    if not os.path.isdir(plot.absolute().parent):
        raise UsageError(f"--plot {plot}: its folder does not exist; make it first")
    if os.path.isdir(plot):
        raise UsageError(f"--plot {plot} is a folder; give the name of a file in it")
    if len(os.fsencode(plot.name)) > os.pathconf(plot.absolute().parent, "PC_NAME_MAX"):
        raise UsageError(f"--plot {plot}: the name is too long; give a shorter one")
    _refuse_unknown_ending(plot)


def _refuse_unknown_ending(plot: Path) -> None:
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.filetypes
    if not plot.suffix:
        raise UsageError(f"--plot {plot}: its name has no ending; call it {plot}.png")
    if plot.suffix[1:].lower() not in known:
        raise UsageError(f"--plot {plot}: no picture ends like this; choose one of {', '.join(sorted(known))}")

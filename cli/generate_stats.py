"""What `sparsekv generate --stats` shows of each layer."""

from rich.table import Table

from sparsekv.cli.console import stderr
from sparsekv.runtime.cache import LayerStats


def print_layers(layers: list[LayerStats]) -> None:
    """A table on stderr; nothing where the method cannot tell what it leaves."""
    if not layers:
        return
    table = Table(title="attention left to centroids or dropped, by estimate", title_justify="left", title_style="")
    for name in ("layer", "left", "heads given more", "heads given all"):
        table.add_column(name, justify="right")
    for one in layers:
        table.add_row(str(one.layer), f"{one.missed:.1%}", f"{one.raised:.1%}", f"{one.dense:.1%}")
    stderr.print(table)

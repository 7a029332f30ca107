"""The table of timed steps: for a person, as JSON, as CSV."""

import json
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from rich.table import Table

from sparsekv.cli.common.console import say, say_csv, show
from sparsekv.runtime.benchmark.rows import Row
from sparsekv.runtime.selection.budget import Budget


def print_rows(rows: Sequence[Row], about: dict[str, Any], *, as_json: bool, as_csv: bool) -> None:
    """Everything on stdout."""
    if as_json:
        say(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=1))
    elif as_csv:
        say_csv([field.name for field in fields(Row)], (asdict(row) for row in rows))
    else:
        groups: dict[tuple[int, int], list[Row]] = {}
        for row in rows:
            groups.setdefault((row.context, row.batch), []).append(row)
        for group in groups.values():
            _print_group(group, about)


def _print_group(rows: list[Row], about: dict[str, Any]) -> None:
    first = rows[0]
    batch = f"{first.batch} questions over one document" if about["shared"] else f"batch {first.batch}"
    table = Table(
        title=f"{first.context:,} tokens, {batch}, {about['heads']} heads on {about['kv_heads']}, "
        f"D = {about['head_dim']}, {about['dtype']}, {about['machine']}, caches {about['caches']}; "
        f"a copy reaches {about['copy_bandwidth'] / 1e9:,.1f} GB/s",
        title_justify="left",
        title_style="",
    )
    table.add_column("method")
    for name in ("budget", "ms [quartiles]", "speed-up", "kv fraction", "MB", "GB/s", "of floor", "error", "timed"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.name,
            "" if row.budget is None else str(Budget(row.budget)),
            f"{row.median_ms:.4f} [{row.lower_ms:.4f}, {row.upper_ms:.4f}]",
            f"{row.speedup:.2f}",
            f"{row.kv_fraction:.3f}",
            f"{row.bytes / 1e6:,.1f}",
            f"{row.bandwidth / 1e9:,.1f}",
            f"{row.floor_share:.2f}",
            f"{row.output_error:.4f}",
            row.timed,
        )
    show(table, width=140)

"""Group a command's --help: its own options by purpose, then the options of methods.

`--method NAME --help` describes a method's options, `--method all --help` those of all methods; a plain --help only
lists their names.
"""

from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand

METHODS_OF = "methods: "  # prefix of a method option's panel; the names of the methods that have it follow
NAMES = "sparsekv.methods"


class GroupedCommand(TyperCommand):
    """A command whose --help groups options by panel."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # --help is handled before other options are parsed, so the names of methods are read here.
        ctx.meta[NAMES] = [*_values_of("--method", args), *_values_of("--prefill", args)]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        owned: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            panel = str(getattr(param, "rich_help_panel", None) or "Options")
            if record is None:
                continue
            if panel.startswith(METHODS_OF):
                owned.setdefault(panel.removeprefix(METHODS_OF), []).append(record)
            else:
                panels.setdefault("Arguments" if param.param_type_name == "argument" else panel, []).append(record)
        for panel, records in panels.items():
            if records:
                with formatter.section(panel):
                    formatter.write_dl(records)
        self._format_methods(ctx, formatter, owned)

    def _format_methods(self, ctx: Any, formatter: Any, owned: dict[str, list[tuple[str, str]]]) -> None:
        wanted = ctx.meta.get(NAMES, [])
        if wanted:
            for owners, records in owned.items():
                # An owner may be more than a name, such as "the index of squeezed".
                if "all" in wanted or set(wanted) & {owner.split(" ")[-1] for owner in owners.split(", ")}:
                    with formatter.section(f"Options of {owners}"):
                        formatter.write_dl(records)
            return
        names: dict[str, list[str]] = {}
        for owners, records in owned.items():
            for owner in owners.split(", "):
                names.setdefault(owner, []).extend(record[0].split(" ")[0] for record in records)
        if names:
            with formatter.section("Options of methods (--method NAME --help says what they do)"):
                formatter.write_dl([(owner, " ".join(options)) for owner, options in sorted(names.items())])


def _values_of(option: str, args: Iterable[str]) -> Iterable[str]:
    before = ""
    for arg in args:
        if before == option:
            yield arg
        elif arg.startswith(f"{option}="):
            yield arg.partition("=")[2]
        before = arg

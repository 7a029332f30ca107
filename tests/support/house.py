"""Layout of the code: rooms (folders), imports, and lengths of files.

Run as a program, this file prints today's counts of files, rooms, floors, imports and lines.
"""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {
    "formats": (),
    "kernels": (),
    "indexing": ("formats", "kernels"),
    "runtime": ("formats", "kernels"),
    "cli": ("formats", "kernels", "indexing", "runtime"),
}
"""Packages that a package may import, besides itself."""
PACKAGES = tuple(MAY_IMPORT)

ROOMS = (
    "formats",
    "formats/user",
    "formats/distributed",
    "formats/index",
    "formats/models",
    "formats/documents",
    "kernels/common",
    "kernels/distributed",
    "kernels/scores",
    "kernels/kmeans",
    "kernels/clusters",
    "kernels/posting_lists",
    "kernels/codes",
    "kernels/attention",
    "kernels/linear",
    "indexing/indexers",
    "indexing/prefill",
    "indexing/capture",
    "indexing/methods",
    "indexing/distributed",
    "indexing",
    "runtime/cache",
    "runtime/selection",
    "runtime/selection/clusters",
    "runtime/methods",
    "runtime/attention",
    "runtime/sources",
    "runtime/decoding",
    "runtime/vllm",
    "runtime/serving",
    "runtime/reporting",
    "runtime/tracing",
    "runtime/tuning",
    "runtime/tasks",
    "runtime/evaluation",
    "runtime/benchmark",
    "runtime",
    "cli/common",
    "cli/distributed",
    "cli/daemon",
    "cli/building",
    "cli/pages",
    "cli/configuring",
    "cli/completing",
    "cli/answering",
    "cli/chatting",
    "cli/serving",
    "cli/reporting",
    "cli/inspecting",
    "cli/evaluating",
    "cli/benchmarking",
    "cli",
)
"""Every room, lowest first: a file imports from its own room and from lower ones."""


@cache
def files() -> dict[str, Path]:
    """Return every file of the packages, by its path without the ending."""
    found = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    return {str(path.relative_to(ROOT).with_suffix("")): path for path in found}


@cache
def tree(name: str) -> ast.Module:
    """Return a file's syntax tree."""
    return ast.parse(files()[name].read_text(encoding="utf-8"))


@cache
def imports() -> dict[str, set[str]]:
    """Return the project's files that each file imports, also within functions."""
    return {name: set(_imported(name)) for name in files()}


def _imported(name: str) -> Iterator[str]:
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("sparsekv."):
            module = node.module.removeprefix("sparsekv.").replace(".", "/")
            for alias in node.names:
                full = f"{module}/{alias.name}"
                yield full if full in files() else module if module in files() else f"{module}/__init__"


def room(name: str) -> str:
    """Return the folder of a file."""
    return name.rpartition("/")[0]


def upward() -> list[tuple[str, str]]:
    """Return imports from a higher room, as pairs: importing file, imported file."""
    floor = {name: number for number, name in enumerate(ROOMS)}
    return [(name, other) for name, of in imports().items() for other in of if floor[room(other)] > floor[room(name)]]


def astray() -> list[tuple[str, str]]:
    """Return imports between packages that MAY_IMPORT does not allow, as pairs: importing file, imported file."""
    return [
        (name, other)
        for name, of in imports().items()
        for other in of
        if _package(other) not in (_package(name), *MAY_IMPORT[_package(name)])
    ]


def _package(name: str) -> str:
    return name.partition("/")[0]


def file_order() -> list[str]:
    """Return the files in an order in which each follows its imports; raise graphlib.CycleError if imports form a
    cycle."""
    return list(TopologicalSorter(imports()).static_order())


def floors(package: str) -> int:
    """Return the number of floors of a package: the longest chain of imports between its rooms."""
    above: dict[str, set[str]] = {}
    for name, of in imports().items():
        above.setdefault(room(name), set()).update(room(other) for other in of if room(other) != room(name))

    @cache
    def floor(name: str) -> int:
        return 1 + max((floor(other) for other in above.get(name, ()) if other.startswith(package)), default=0)

    return max(floor(name) for name in above if name.startswith(package))


def _print() -> None:
    print("| folder | files | rooms | floors |\n|---|---:|---:|---:|")
    for package in PACKAGES:
        inside = [name for name in files() if name.startswith(f"{package}/") and not name.endswith("__init__")]
        print(f"| `{package}/` | {len(inside)} | {len({room(name) for name in inside})} | {floors(package)} |")
    arrows = sum(len(of) for of in imports().values())
    file_order()
    lines = sorted(len(path.read_text(encoding="utf-8").splitlines()) for path in files().values())
    lines = [count for count in lines if count]
    print(f"\nimports {arrows}, upward {len(upward())}, cycles 0")
    median, most = lines[len(lines) // 2], lines[len(lines) * 9 // 10]
    print(f"files with code {len(lines)}, lines of the median {median}, of nine in ten at most {most}")


if __name__ == "__main__":
    _print()

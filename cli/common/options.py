"""Options with the same meaning in every command, and the panels of a command's help.

Values that no command can use are refused: text that is not UTF-8, NaN, infinities, numbers beyond int64, and several
values for an option that takes one.
"""

import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from sparsekv.formats.errors import UsageError

LARGEST = 2**63 - 1


def refuse_repeated(command: Any, ctx: Any, args: list[str]) -> None:
    """Raise UsageError for an option that takes one value and is given several times. Otherwise the last value would
    win silently."""
    _, _, in_order = command.make_parser(ctx).parse_args([*args])
    options = Counter(one for one in in_order if one.param_type_name == "option")
    for option, times in options.items():
        single = not option.multiple and (option.secondary_opts or not option.is_flag)
        if single and times > 1:
            often = "twice" if times == 2 else f"{times} times"
            raise UsageError(f"{_named(option)} is given {often} and takes one value; give it once")


def _named(parameter: Any) -> str:
    if parameter.param_type_name == "option":
        return str(max(parameter.opts, key=len))
    return str(parameter.metavar or parameter.name)


def refuse_unusable(command: Any, ctx: Any) -> None:
    """Raise UsageError if a parameter of a command has a value that no command can use."""
    names = {one.name: _named(one) for one in command.params}
    for name, value in ctx.params.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            refuse_unusable_value(names[name], one)


def refuse_unusable_value(name: str, value: Any) -> None:
    """Raise UsageError for a value that no command can use. Paths are not checked, because a file name may contain
    any bytes."""
    if isinstance(value, str) and not _is_utf8(value):
        raise UsageError(f"{name} {value} is not text in UTF-8; write it in UTF-8, or give a file that is")
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"{name} {value}: give a finite number")
    if isinstance(value, int) and abs(value) > LARGEST:
        raise UsageError(f"{name} {value}: give a whole number from -{LARGEST} to {LARGEST}")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


LOCAL, AUTO = "local", "auto"
RayOption = Annotated[
    str | None,
    typer.Option(
        metavar="local|auto|HOST:PORT",
        help=(
            "Distribute the work over workers of a Ray cluster. Each worker loads the model and processes "
            "one document (in eval: one context) at a time. local: a cluster started on this machine; auto: "
            "the cluster that this machine belongs to; HOST:PORT: the cluster at this address. Needs pip "
            "install 'sparsekv[ray]'."
        ),
        rich_help_panel="Many documents",
    ),
]
WorkersOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Workers of --ray. Default: one per GPU; without GPUs, one per four CPUs.",
        rich_help_panel="Many documents",
    ),
]


def check_ray(ray: str | None, workers: int | None) -> None:
    """Raise UsageError if `ray` is not the address of a cluster, or if a number of workers is given without a
    cluster."""
    if workers is not None and ray is None:
        raise UsageError(f"--workers {workers} has no effect without --ray; leave --workers out")
    if ray is not None and ray not in (LOCAL, AUTO) and not re.fullmatch(r"(ray://)?[^\s/]+:\d{1,5}", ray):
        raise UsageError(f"--ray {ray}: give {LOCAL}, {AUTO} or HOST:PORT")


def share(text: str | float) -> float:
    """Parse a share such as `0.05` or `5%`; a project's file may give a number. Raises `typer.BadParameter` for
    other text."""
    text = str(text).strip()
    try:
        # Decimal arithmetic makes 2.9% exactly equal to 0.029.
        return float(Decimal(text[:-1]) / 100) if text.endswith("%") else float(text)
    except (ValueError, InvalidOperation):
        raise typer.BadParameter(f"{text or repr(text)} is not a share; give one such as 0.9 or 90%") from None


ATTENDED, PLACED = "What is attended to", "Where the document lies"
"""Titles of groups of options in --help."""
METHODS_OF = "methods: "  # prefix of the panel of methods' options; the methods' names follow
NAMES = "sparsekv.methods"
ANY_METHOD = {"all", "auto"}
"""Values of `--method` that stand for any method."""


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
                named = {owner.split(" ")[-1] for owner in owners.split(", ")} | ANY_METHOD
                if named.intersection(wanted):
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


def refuse_impossible_name(path: Path, option: str) -> None:
    """Raise UsageError if the path is a folder, its folder is missing, or its name is too long."""
    if not os.path.isdir(path.absolute().parent):
        raise UsageError(f"{option} {path}: the folder to write it in does not exist; create that folder first")
    if os.path.isdir(path):
        raise UsageError(f"{option} {path} is a folder; give the name of a file in it")
    if len(os.fsencode(path.name)) > os.pathconf(path.absolute().parent, "PC_NAME_MAX"):
        raise UsageError(f"{option} {path}: the name is too long; give a shorter one")


def refuse_unwritable_plot(plot: Path | None) -> None:
    """Raise UsageError if a plot cannot be written: its folder is missing, or its file name or ending is not valid."""
    if plot is None:
        return
    refuse_impossible_name(plot, "--plot")
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.filetypes
    if not plot.suffix:
        raise UsageError(f"--plot {plot}: the name has no extension; give {plot}.png")
    if plot.suffix[1:].lower() not in known:
        raise UsageError(
            f"--plot {plot}: there is no image format with this extension; give a name that ends in one of "
            f"{', '.join(sorted(known))}"
        )


def check_model(name: str | None) -> str | None:
    """Return the name unchanged. Raises UsageError if it is empty, or begins with `~user` for a user that does not
    exist."""
    if name is not None and not name.strip():
        raise UsageError("--model is empty; leave it out for the default, or name one of `sparsekv models list`")
    try:
        Path(name or "").expanduser()
    except RuntimeError:
        raise UsageError(f"model '{name}': this machine has no such user; give the folder's full path") from None
    return name


def names_of(registry: Callable[[], Iterable[str]], *further_names: str) -> Callable[[], list[str]]:
    """Return a function for `typer.Option(autocompletion=...)` that lists a registry's names and `further_names`.

    The registry is read only when completion calls the function.
    """
    return lambda: [*registry(), *further_names]


def _embedded() -> list[str]:
    from sparsekv.formats.models.find import EMBEDDED  # the module imports torch, for which --help does not wait

    return [EMBEDDED]


IndexOption = Annotated[
    Path | None,
    typer.Option(
        "--index",
        "-i",
        metavar="NAME.skv",
        help="The index. Default: the current folder's only *.skv.",
        envvar="SPARSEKV_INDEX",
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="A name of `sparsekv models list`, a Hugging Face id, a local folder or a GGUF file.",
        callback=check_model,
        envvar="SPARSEKV_MODEL",
        autocompletion=_embedded,
    ),
]
DeviceOption = Annotated[
    str,
    typer.Option(
        help="auto (a GPU if there is one), cpu, cuda or cuda:N.",
        envvar="SPARSEKV_DEVICE",
        autocompletion=lambda: ["auto", "cpu", "cuda"],
    ),
]
DtypeOption = Annotated[
    str,
    typer.Option(
        help="Dtype of the model, keys and values: auto, float32, float16 or bfloat16.",
        envvar="SPARSEKV_DTYPE",
        autocompletion=lambda: ["auto", "float32", "float16", "bfloat16"],
    ),
]


def _weights_option(auto: str) -> Any:
    """Return the option `--weights`. Its help has the text `auto` as the meaning of the value auto."""
    return typer.Option(
        metavar="auto|int8|int4",
        help="Precision to which the weights of linear layers are rounded when the model is loaded: int8 or int4. "
        f"auto: {auto}. Embeddings, routers and fused experts stay as they are.",
        autocompletion=lambda: ["auto", "int8", "int4"],
    )


CompileOption = Annotated[
    str,
    typer.Option(
        "--compile",
        metavar="auto|on|off",
        help="Compile the steps that decode one answer alone. They are faster, but the start takes longer. auto: on a "
        "GPU, only layers that need no kernels of torch's compiler, which takes two to five seconds. on: all layers, "
        "which takes up to fifteen seconds.",
    ),
]
WeightsOption = Annotated[str, _weights_option("as the index was built; another precision is refused")]
BuildWeightsOption = Annotated[
    str, _weights_option("not rounded. An existing index with int8 or int4 weights is then built again")
]


def _kv_dtype_option(ending: str = "") -> Any:
    """Return the option `--kv-dtype`, whose help ends with `ending`."""
    return typer.Option(
        help="Storage dtype of keys and values: auto (the model's dtype) or int8, which takes about half the space of "
        "bfloat16 and a quarter of that of float32. The error that int8 causes in attention is measured and recorded "
        f"in the index.{ending}",
        autocompletion=lambda: ["auto", "int8"],
    )


KVDtypeOption = Annotated[str, _kv_dtype_option()]
BuildKVDtypeOption = Annotated[str, _kv_dtype_option(" With auto, an existing int8 index is built again.")]
SpecialTokensOption = Annotated[
    bool,
    typer.Option(
        "--special-tokens", help="Let special tokens in the text keep their meaning. Only for text you wrote yourself."
    ),
]
ENCODING_HELP = (
    "Encoding of the text: utf-8, utf-16, latin-1, cp1252, ... (Python's names). UTF-16 and UTF-32 are also recognised "
    "by a byte order mark."
)
TAIL_HELP = "Number of tokens at the end of the prompt that are always attended and never indexed."
SinksOption = Annotated[
    int,
    typer.Option(help="Number of tokens at the beginning of the prompt that are always attended and never indexed."),
]
EncodingOption = Annotated[str, typer.Option(metavar="NAME", help=ENCODING_HELP)]


def _chunk_size_option(otherwise: str) -> Any:
    """Return the option `--chunk-size`. Its help lists the defaults; the text `otherwise` is the end of this list."""
    return typer.Option(
        help=f"Tokens per forward pass of the prefill. Default: 2,048 (8,192 on a GPU{otherwise}).",
    )


ChunkSizeOption = Annotated[int | None, _chunk_size_option("; a sparse prefill 512")]
BuildChunkSizeOption = Annotated[int | None, _chunk_size_option(", 16,384 on several; a sparse prefill 512")]
AppendChunkSizeOption = Annotated[int | None, _chunk_size_option("; after a sparse prefill, that of the index")]
RopeScalingOption = Annotated[
    str | None,
    typer.Option(metavar="yarn|dynamic:FACTOR", help="Extend the model's context to FACTOR times its positions."),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress and no notes.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, with unrounded numbers.")]


Markup = Literal["latex", "markdown"]
"""Markup language of a table that is not for a terminal."""


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Options for the format in which a command prints its result; without them it prints tables for a terminal."""

    as_json: JsonOption = False
    as_latex: Annotated[
        bool, typer.Option("--latex", help="Print one LaTeX table and nothing else; it needs the package booktabs.")
    ] = False
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print one Markdown table (GitHub's) and nothing else.")
    ] = False

    def check(self) -> None:
        """Raise UsageError if more than one format is given."""
        given = [f"--{field.name.removeprefix('as_')}" for field in fields(self) if getattr(self, field.name)]
        if len(given) > 1:
            raise UsageError(f"{given[0]} and {given[1]} exclude each other: choose one")

    @property
    def markup(self) -> Markup | None:
        """The markup language in which the table is printed; None without --latex and --markdown."""
        return "latex" if self.as_latex else "markdown" if self.as_markdown else None


@dataclass(frozen=True, kw_only=True)
class FormatOptions(TableOptions):
    """The options of `TableOptions`, and CSV."""

    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options for the device and the dtype in which a command computes, and for its notes."""

    device: DeviceOption = "auto"
    dtype: DtypeOption = "auto"
    quiet: QuietOption = False

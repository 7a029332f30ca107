"""Options of `bench` and `bench-model`. This module imports no timers, so that `--help` does not wait for them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsekv.cli.common.options import FormatOptions, RunOptions, TableOptions, names_of
from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.schema import AUTO, KV_DTYPES, kv_dtype_named
from sparsekv.runtime.benchmark.settings import CONFIGS, LAYER_METHODS, MODEL_METHODS, Wanted
from sparsekv.runtime.selection.interface import methods

DEFAULT_BUDGETS = ["5%", "10%"]


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Options for the timed steps. `bench` and `bench-model` share these options."""

    batch: Annotated[
        list[int] | None,
        typer.Option(help="Contexts per batch, or with --shared questions over one context; repeatable. Default: 1."),
    ] = None
    shared: Annotated[
        bool, typer.Option("--shared", help="Time the questions of a --batch over one context, which they share.")
    ] = False
    budget: Annotated[
        list[str] | None,
        typer.Option(help="Share (0.05, 5%) or number of tokens to attend to; repeatable. Default: 5% and 10%."),
    ] = None
    kv_dtype: Annotated[
        str,
        typer.Option(
            metavar="auto|int8",
            help=(
                "Storage dtype of the synthetic keys and values that sparsekv's steps read; on a GPU only. auto: that "
                "of --dtype. With int8 and --shared, MB counts selected rows at full precision."
            ),
            autocompletion=names_of(lambda: KV_DTYPES),
        ),
    ] = AUTO
    seed: Annotated[int, typer.Option(help="Seed of the synthetic data and of the indices.")] = 0

    def wanted(self, contexts: list[str] | None, dtype: str) -> Wanted:
        """Return the sizes of the layers to time. The numbers of heads and channels are None, which means the defaults.

        Args:
            contexts, dtype: values of --context and --dtype.

        Raises:
            UsageError: --shared is given without --batch, or the storage dtype is unknown.
        """
        if self.shared and not self.batch:
            raise UsageError(
                "--shared needs the number of questions that share a document; give it with --batch, such as --batch 16"
            )
        stored, heads = kv_dtype_named(self.kv_dtype), (None, None, None)
        return Wanted(contexts or [], self.batch or [], *heads, dtype, self.seed, self.shared, stored)


ITERATIONS = 3  # iterations of k-means: more of them improve the clusters, but not the time of a step


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Command-line options of `bench`."""

    ctx: typer.Context
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Method to time, or `all`; repeatable. Default: {', '.join(LAYER_METHODS)}.",
            autocompletion=names_of(methods, "all"),
        ),
    ] = None
    variants: Annotated[
        bool, typer.Option("--variants", help="Time every variant of each method that recall-report compares.")
    ] = False
    context: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKENS",
            help="Tokens of context, such as 32768 or 128K; repeatable. Default: 8K and 32K; CUDA: 128K.",
        ),
    ] = None
    steps: StepOptions
    heads: Annotated[int | None, typer.Option(help="Number of query heads. Default: 9; CUDA: 32.")] = None
    kv_heads: Annotated[int | None, typer.Option(help="Number of KV heads. Default: 3; CUDA: 8.")] = None
    head_dim: Annotated[int | None, typer.Option(help="Channels per head. Default: 64; CUDA: 128.")] = None
    index: Annotated[
        Path | None,
        typer.Option("--index", "-i", metavar="NAME.skv", help="Time a layer of this index, not synthetic data."),
    ] = None
    layer: Annotated[int | None, typer.Option(help="Layer of the --index. Default: the middle one.")] = None
    runs: Annotated[int | None, typer.Option(help="Runs per step. Default: 20; CUDA: 50.")] = None
    warm: Annotated[
        bool,
        typer.Option(
            "--warm",
            help="Do not flush the CPU's or GPU's caches between runs. In a model they are cold: other "
            "layers run in between.",
        ),
    ] = False
    format: FormatOptions
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png",
            help="Plot speed-up against context length (with --shared, against the number of questions), and time "
            "against bytes read.",
        ),
    ] = None
    run: RunOptions
    parameters: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class BenchModelOptions:
    """Command-line options of `bench-model`."""

    config: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FOLDER",
            help=f"Shape of the model: {', '.join(CONFIGS)}, or a folder with a config.json. Default: "
            "smollm2-135m; CUDA: qwen3-8b.",
            autocompletion=names_of(lambda: CONFIGS),
        ),
    ] = None
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Method to time, or `all`; repeatable. Default: {', '.join(MODEL_METHODS)}.",
            autocompletion=names_of(methods, "all"),
        ),
    ] = None
    context: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKENS", help="Tokens of context, such as 32768 or 128K; repeatable. Default: 8K; CUDA: 128K."
        ),
    ] = None
    weights: Annotated[
        list[str] | None,
        typer.Option(
            metavar="auto|int8|int4",
            help="Precision to which the weights of linear layers are rounded: auto (not rounded), int8 or int4; "
            "repeatable. Default: auto.",
            autocompletion=lambda: ["auto", "int8", "int4"],
        ),
    ] = None
    steps: StepOptions
    distinct_layers: Annotated[
        int | None,
        typer.Option(
            help=("Number of layers for which keys and values are generated; all layers use these in turn. Default: 2.")
        ),
    ] = None
    runs: Annotated[int | None, typer.Option(help="Runs per step. Default: 10; CUDA: 30.")] = None
    compiled: Annotated[
        str,
        typer.Option(
            "--compile",
            metavar="auto|on|off",
            help=(
                "Compile the model's layers with torch, except their attention, for every row of the table. "
                "auto: on a GPU."
            ),
        ),
    ] = "auto"
    format: TableOptions
    run: RunOptions
    parameters: dict[str, Any]

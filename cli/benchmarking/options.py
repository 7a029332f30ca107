"""Options that `bench` and `bench-model` share."""

from dataclasses import dataclass
from typing import Annotated

import typer

from sparsekv.cli.common.options import names_of
from sparsekv.formats.errors import UsageError
from sparsekv.formats.index.schema import AUTO, KV_DTYPES, kv_dtype_named
from sparsekv.runtime.benchmark.sources import Wanted

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
                "Storage dtype of the synthetic keys and values that sparsekv's steps read; on a GPU only. auto: the "
                "--dtype. With int8 and --shared, MB counts selected rows at full precision."
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

"""The manifest's record of keys and values that are stored in fewer bits than the index's dtype."""

from typing import Annotated, Literal, TypeAlias, get_args

from pydantic import Field

from sparsekv.formats.errors import UsageError
from sparsekv.formats.record import Record, Sha256, Size
from sparsekv.formats.suggestions import choose_one

KVDtype: TypeAlias = Literal["int8"]
"""What keys and values can be stored in, beside the model's dtype."""
AUTO = "auto"
KV_DTYPES: tuple[str, ...] = (AUTO, *get_args(KVDtype))
"""Values of `--kv-dtype`; `auto` is the model's dtype."""


def kv_dtype_named(name: str) -> KVDtype | None:
    """What a value of `--kv-dtype` stores keys and values in, None for the model's dtype; UsageError for another."""
    found: KVDtype | None = next((known for known in get_args(KVDtype) if known == name), None)
    if found is None and name != AUTO:
        raise UsageError(f"--kv-dtype {name}: {choose_one(name, KV_DTYPES)}")
    return found


class KVStorage(Record):
    """How keys and values are stored where not in the index's dtype, and what dense attention loses by it.

    `errors` has for each layer the relative error of dense attention over the stored rows against dense attention over
    the exact ones, the mean over the tail's queries and the heads. It was measured on a prompt of `measured_tokens`
    tokens whose hash is `measured_ids`: an earlier one than the index's where rows of that one were taken over.
    `exact_probe`: the logits of probe and canary are those over the rows before they were rounded, as a conversion,
    which runs no model, takes them over.
    """

    dtype: KVDtype
    errors: list[Annotated[float, Field(ge=0)]] = Field(min_length=1)
    measured_ids: Sha256
    measured_tokens: Size
    exact_probe: bool = True

    @property
    def error(self) -> float:
        """The mean over layers."""
        return sum(self.errors) / len(self.errors)

    @property
    def worst(self) -> int:
        """The layer of the largest error."""
        return max(range(len(self.errors)), key=self.errors.__getitem__)

"""The base of everything in `manifest.json`, and the kinds of its numbers and names."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from sparsekv.formats.names import FILE_NAME, METHOD_NAME

MOST_TOKENS = 2**31 - 1  # positions are int32

FileName = Annotated[str, StringConstraints(pattern=FILE_NAME)]
MethodName = Annotated[str, StringConstraints(pattern=METHOD_NAME)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
Share = Annotated[float, Field(gt=0, le=1)]
Size = Annotated[int, Field(ge=1, le=MOST_TOKENS)]


class Record(BaseModel):
    """Base class of everything in the manifest: immutable. Fields that a newer, readable schema adds are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=(), allow_inf_nan=False)

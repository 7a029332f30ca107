"""Errors of the HTTP API, in the JSON format of OpenAI's API."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.responses import Response

from sparsekv.formats.errors import SparsekvError, UsageError

NO_RETRY = {"x-should-retry": "false"}
"""Header that keeps OpenAI's clients from repeating a request after a status of 500 or more."""


class ErrorBody(BaseModel):
    """An error: a message, its kind, the wrong field of the request, and a short code."""

    model_config = ConfigDict(extra="forbid")

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(BaseModel):
    """The body of every answer with a status of 400 or more."""

    model_config = ConfigDict(extra="forbid")

    error: ErrorBody


@dataclass
class ApiError(Exception):
    """Raised for a request that is refused or fails; has the HTTP status of the response.

    Attributes:
        param: the wrong field of the request, such as `messages.0.content`.
        headers: further headers of the response.
    """

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def json(self) -> str:
        """Return the body of the response."""
        body = ErrorBody(message=self.message, type=self.type, param=self.param, code=self.code)
        return ErrorAnswer(error=body).model_dump_json()

    def response(self) -> Response:
        """Return the response."""
        return Response(self.json(), self.status, self.headers, "application/json")


def failure(error: SparsekvError) -> ApiError:
    """Convert an exception to an error of the API: status 400 for a UsageError, otherwise 500."""
    if isinstance(error, UsageError):
        return ApiError(400, str(error))
    return ApiError(500, str(error), "server_error", headers=NO_RETRY)


UNSUPPORTED = "unsupported"
"""Marks a field of OpenAI's API that may only have the value without effect."""


def invalid(kind: type[BaseModel], error: ValidationError, given: Any) -> ApiError:
    """Return the error for an invalid body: the validation error with the longest path of fields.

    Args:
        kind: the pydantic model of the body.
        given: the body, parsed from JSON.
    """
    paths = [(_path(one["loc"], given), one) for one in error.errors(include_url=False, include_input=False)]
    # A field with several types has an error for each type. Errors other than a wrong type say more.
    path, first = max(paths, key=lambda pair: (len(pair[0]), not pair[1]["type"].endswith("_type")))
    name, told = ".".join(map(str, path)), first["msg"].removeprefix("Value error, ")
    field_info = kind.model_fields.get(str(path[0])) if path else None
    if field_info is not None and UNSUPPORTED in field_info.metadata:
        told = f"{name} is not supported; leave it out"
        return ApiError(400, told, param=name, code="unsupported_parameter")
    if first["type"] == "extra_forbidden":
        return ApiError(
            400, f"{name} is not a field of this request; leave it out", param=name, code="unknown_parameter"
        )
    if first["type"] == "missing":
        return ApiError(400, f"{name} is missing", param=name, code="missing_required_parameter")
    return ApiError(400, f"{name}: {told}" if name else told, param=name or None, code="invalid_value")


def _path(loc: tuple[int | str, ...], given: Any) -> list[int | str]:
    """Return the path of an error's field without the type names that pydantic adds for unions."""
    path: list[int | str] = []
    for number, one in enumerate(loc):
        last = number == len(loc) - 1
        if isinstance(given, dict) and (one in given or last):
            path.append(one)
            given = given.get(one)
        elif isinstance(given, list) and isinstance(one, int) and one < len(given):
            path.append(one)
            given = given[one]
    return path

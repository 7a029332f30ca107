"""Errors of the HTTP API, in the JSON format of OpenAI's API."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails
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
    """The body of a response that reports an error."""

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
"""Marks a field of OpenAI's API that is not supported: only the value without effect is accepted."""


_REMEDIES = {
    "greater_than": "give more than {gt}",
    "greater_than_equal": "give at least {ge}",
    "less_than": "give less than {lt}",
    "less_than_equal": "give at most {le}",
    "finite_number": "give a finite number",
    "string_too_short": "give at least {min_length} character",
    "string_too_long": "give at most {max_length} characters",
    "too_short": "give at least {min_length} item",
    "too_long": "give at most {max_length} items",
    "literal_error": "give {expected}",
}
"""Remedies for a value that pydantic refuses, by pydantic's name of the error."""
_TYPES = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "a string",
    "list_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "none_required": "null",
}
"""Names of the types that a field accepts, by pydantic's name of the error for a value of another type."""


def _remedy(errors: Sequence[ErrorDetails]) -> str:
    """Return the remedy for the errors of one value. A value of a wrong type has an error for each allowed type."""
    first = next((one for one in errors if one["type"] not in _TYPES), None)
    if first is None:
        return f"give {' or '.join(dict.fromkeys(_TYPES[one['type']] for one in errors))}"
    told = {name: f"{value:g}" if isinstance(value, float) else value for name, value in first.get("ctx", {}).items()}
    return _REMEDIES.get(first["type"], "give another value").format(**told).replace("False", "false")


def invalid(kind: type[BaseModel], error: ValidationError, given: Any) -> ApiError:
    """Return the error for an invalid body: the validation error with the longest path of fields.

    Args:
        kind: the pydantic model of the body.
        given: the body, parsed from JSON.
    """
    paths = [(_path(one["loc"], given), one) for one in error.errors(include_url=False, include_input=False)]
    path, first = max(paths, key=lambda pair: len(pair[0]))
    name, same = ".".join(map(str, path)), [one for where, one in paths if where == path]
    field_info = kind.model_fields.get(str(path[0])) if path else None
    if field_info is not None and UNSUPPORTED in field_info.metadata:
        return ApiError(400, f"{name} is not supported; leave it out", param=name, code="unsupported_parameter")
    if first["type"] == "extra_forbidden":
        return ApiError(
            400, f"{name} is not a field of this request; leave it out", param=name, code="unknown_parameter"
        )
    if first["type"] == "missing":
        return ApiError(400, f"{name} is missing", param=name, code="missing_required_parameter")
    told = f"{name}: {_remedy(same)}" if name else "the body is not an object; send a JSON object"
    return ApiError(400, told, param=name or None, code="invalid_value")


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

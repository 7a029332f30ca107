"""Escape untrusted text so that it cannot control a terminal."""

import json
import math
import re
from typing import Any

_SURROGATES = "\ud800-\udfff"
_BIDI = "\u202a-\u202e\u2066-\u2069"
_STEERING = re.compile(rf"\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f{_BIDI}{_SURROGATES}]")
_RAW_IN_JSON = re.compile(rf"[\x7f-\x9f\u2028\u2029{_BIDI}{_SURROGATES}]")
_BYTES = range(0xDC80, 0xDD00)
"""Surrogates by which Python represents bytes of a file name that are not UTF-8."""


def printable(text: str) -> str:
    """The text with control characters, bidi overrides and undecodable bytes escaped, as in `\\x1b` or `\\u202e`.

    Line ends and tabs stay.
    """
    return _STEERING.sub(lambda found: _escaped(ord(found[0])), text)


def json_text(value: Any) -> str:
    """JSON on one line: non-ASCII letters are kept, control characters and line ends are escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return _RAW_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def finite_numbers(value: Any) -> Any:
    """The same with None for numbers that are not finite, for which JSON has no word."""
    if isinstance(value, dict):
        return {name: finite_numbers(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite_numbers(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _escaped(code: int) -> str:
    code = code - 0xDC00 if code in _BYTES else code
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"

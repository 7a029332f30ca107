"""Refuse option values that no command can use: text that is not UTF-8, NaN, infinities, numbers beyond int64. Also
refuse several values for an option that takes one."""

import math
from collections import Counter
from typing import Any

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


def check_values(command: Any, ctx: Any) -> None:
    """Raise UsageError if a parameter of a command has a value that no command can use."""
    names = {one.name: _named(one) for one in command.params}
    for name, value in ctx.params.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            check_value(names[name], one)


def check_value(name: str, value: Any) -> None:
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

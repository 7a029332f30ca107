"""What a command line that typer does not understand is told."""

import pytest

from sparsekv.cli.common.wrong_usage import described_usage

NUMBER = "Invalid value for '--outliers': Input should be a valid number, unable to parse string as a number."
WHOLE = "Invalid value for '--seed': Input should be a valid integer, unable to parse string as an integer."


@pytest.mark.parametrize(
    ("message", "arguments", "told"),
    [
        (NUMBER, ["build-index", "doc.txt", "--outliers", "5%"], "--outliers 5%: give a number, such as 0.05"),
        (NUMBER, ["build-index", "doc.txt", "--outliers=many"], "--outliers many: give a number, such as 0.05"),
        (WHOLE, ["eval", "--seed", "1", "--seed", "one"], "--seed one: give a whole number"),
        (WHOLE, ["eval", "-x"], "--seed: give a whole number"),
    ],
)
def test_what_is_no_number_is_told_with_the_number(message: str, arguments: list[str], told: str) -> None:
    assert described_usage(message, arguments[0], arguments) == told

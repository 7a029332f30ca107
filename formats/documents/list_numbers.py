"""Numbers of list items in letters and Roman numerals."""

import string

_ROMAN = (
    *((1000, "m"), (900, "cm"), (500, "d"), (400, "cd"), (100, "c"), (90, "xc"), (50, "l"), (40, "xl")),
    *((10, "x"), (9, "ix"), (5, "v"), (4, "iv"), (1, "i")),
)


def in_letters(number: int) -> str:
    """Return a number of at least 1 in letters: a to z, aa, ab, ... An empty string for a smaller number."""
    letters = ""
    while number > 0:
        number, letter = divmod(number - 1, 26)
        letters = string.ascii_lowercase[letter] + letters
    return letters


def in_repeated_letters(number: int) -> str:
    """Return a number from 1 to 780 in repeated letters: a to z, aa, bb, ... An empty string for another number."""
    times, letter = divmod(number - 1, 26)
    return string.ascii_lowercase[letter] * (times + 1) if 0 < number <= 780 else ""


def in_roman(number: int) -> str:
    """Return a number from 1 to 3999 in Roman numerals of lower case. An empty string for another number."""
    numerals = ""
    if 0 < number < 4000:
        for value, numeral in _ROMAN:
            numerals += numeral * (number // value)
            number %= value
    return numerals

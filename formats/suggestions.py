"""What a person may have meant by a name that there is not."""

from collections.abc import Iterable

NEAR = 70.0
"""The least similarity, of 100, at which a name is suggested: one or two letters of a word differ."""


def suggestion(given: str, known: Iterable[str]) -> str:
    """` (did you mean NAME?)` with the known name that is most like the given one; empty where none is."""
    near = nearest(given, known)
    return "" if near is None else f" (did you mean {near}?)"


def nearest(given: str, known: Iterable[str]) -> str | None:
    """The known name that is most like the given one; None where none is."""
    from rapidfuzz import fuzz, process  # here: --help need not wait for it

    names = [*known]
    # Letters in common first: `code` is in tidaldecode as a whole, and nearer to codes.
    for alike in (fuzz.ratio, fuzz.WRatio):
        found = process.extractOne(given, names, scorer=alike, score_cutoff=NEAR, processor=str.lower)
        if found is not None:
            return str(found[0])
    return None


def choose_one(given: str, known: Iterable[str]) -> str:
    """`choose one of A, B, C`, and which of them may have been meant."""
    names = [*known]
    return f"choose one of {', '.join(names)}{suggestion(given, names)}"

"""A line of bash is read as bash reads it, and what is put into it is read back as the word that was meant."""

import shlex

from hypothesis import given
from hypothesis import strategies as st

from sparsekv.cli.completing.candidates import read_bash_line

BREAKS = " \t\n\"'><=;|&(:"
WORD = st.text(st.sampled_from("abz.-_/~=: '\"\\$`*?;&|()é"), min_size=1, max_size=12)


def escaped(word: str) -> str:
    """The word with a backslash before every letter that could mean something."""
    return "".join(letter if letter.isalnum() or letter in "./_-=:" else f"\\{letter}" for letter in word)


@given(st.lists(WORD, min_size=1, max_size=5))
def test_words_are_those_that_bash_passes_on(words: list[str]) -> None:
    assert read_bash_line(shlex.join(words), BREAKS).words == words
    assert read_bash_line(" ".join(map(escaped, words)), BREAKS).words == words


@given(WORD, st.integers(0, 12))
def test_what_is_inserted_completes_the_word(word: str, typed: int) -> None:
    """Bash replaces what follows the last `=` or `:` of the word that is typed."""
    begun = escaped(word[:typed])
    line = read_bash_line(f"sparsekv inspect {begun}", BREAKS)
    kept = begun[: max(begun.rfind("="), begun.rfind(":")) + 1]
    inserted = line.insertion(word)
    assert inserted is not None
    assert shlex.split(kept + inserted) == [word]


@given(WORD, st.integers(0, 12), st.sampled_from("\"'"))
def test_within_a_quote_a_word_is_completed_as_it_is_or_not_at_all(word: str, typed: int, quote: str) -> None:
    begun = "".join(letter for letter in word[:typed] if letter not in "\"'\\")
    word = begun + word[typed:]
    line = read_bash_line(f"sparsekv inspect --index={quote}{begun}", BREAKS)
    assert (line.quote, line.words[-1]) == (quote, f"--index={begun}")
    inserted = line.insertion(f"--index={word}")
    if inserted is not None:
        assert shlex.split(f"{quote}{inserted}{quote}") == [word]
    else:
        assert set(word) & {quote, *"$`\\!"}

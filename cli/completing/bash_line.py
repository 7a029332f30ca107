"""Read a command line as bash has it, which its completion passes on as one text."""

import re
from dataclasses import dataclass

_BLANK = " \t\n"
_PLAIN = re.compile(r"[\w./@%+,:=~-]")


@dataclass(frozen=True)
class BashLine:
    """Words without their quotes, of which the last is incomplete.

    quote: the quotation mark that is still open in it.
    replaced: how many of its letters stay: bash replaces what follows the last `=` or `:`, or an open quote.
    """

    words: list[str]
    quote: str
    replaced: int

    def insertion(self, word: str) -> str | None:
        """What bash is to put in the place of the incomplete word's end; None where a quote cannot hold the word."""
        rest = word[self.replaced :]
        if self.quote:
            return None if self.quote in rest or (self.quote == '"' and re.search(r"[$`\\!]", rest)) else rest
        return "".join(letter if _PLAIN.match(letter) else f"\\{letter}" for letter in rest)


def read_bash_line(line: str, breaks: str) -> BashLine:
    """The words of a line up to the cursor.

    Args:
        breaks: `$COMP_WORDBREAKS`.
    """
    words, quote, replaced, inside = [""], "", 0, False
    letters = iter(line)
    for letter in letters:
        if letter == "\\" and quote != "'":
            words[-1] += next(letters, "")
            inside = True
        elif quote:
            quote, words[-1] = ("", words[-1]) if letter == quote else (quote, words[-1] + letter)
        elif letter in "\"'":
            quote, replaced, inside = letter, len(words[-1]), True
        elif letter in _BLANK:
            if inside:
                words.append("")
            replaced, inside = 0, False
        else:
            words[-1] += letter
            replaced, inside = (len(words[-1]) if letter in "=:" and letter in breaks else replaced), True
    return BashLine(words, quote, replaced)

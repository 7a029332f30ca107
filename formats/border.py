"""The manifest's record of where the stored tokens of a prompt end in its text."""

from pydantic import Field

from sparsekv.formats.record import Record


class Border(Record):
    """The end of the prompt's text, which decides the first tokens of what follows."""

    lead: str = Field(description="last characters whose tokens are stored; what follows is tokenised behind them")
    held: str = Field(
        default="", description="characters after them, whose tokens depend on what follows: each question begins so"
    )

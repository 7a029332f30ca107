"""The budget: how many middle tokens a step may attend to, as a share or as a count."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from sparsekv.formats.errors import UsageError


@dataclass(frozen=True)
class Budget:
    """A share of the middle (0 < value <= 1, a float) or a count of tokens (an int of 1 or more)."""

    value: float | int
    is_share: bool = field(init=False)

    def __post_init__(self) -> None:
        # Kept as a field so that everything (1.0) and one token (1) do not compare equal.
        object.__setattr__(self, "is_share", isinstance(self.value, float))

    @classmethod
    def parse(cls, text: str, option: str = "--budget") -> "Budget":
        """`0.05` and `5%` are shares, `1.0` and `100%` everything, `300` a number of tokens.

        Args:
            option: the option that an error message names.

        Raises:
            UsageError: not a number, not above 0, or a share above 1.
        """
        try:
            percent = text.endswith("%")
            value = float(text.removesuffix("%")) / 100 if percent else float(text)
        except ValueError:
            raise UsageError(f"{option} {text or repr(text)}: {_WANTED}") from None
        if not percent and value >= 1 and text.lstrip("+").isdigit():
            return cls(int(text))
        if not 0 < value <= 1:
            raise UsageError(f"{option} {text}: {_WANTED}")
        return cls(value)

    @classmethod
    def parse_each(cls, texts: Iterable[str]) -> list["Budget"]:
        """Budgets in the order given, each once: 5% and 0.05 are the same. Raises what `parse` raises."""
        return list(dict.fromkeys(cls.parse(text) for text in texts))

    def tokens(self, middle: int) -> int:
        """The budget in tokens for a middle of M tokens; at least 1, at most M."""
        count = self.value if isinstance(self.value, int) else round(self.value * middle)
        return max(1, min(middle, count))

    def share(self, middle: int) -> float:
        """The budget as a share of a middle of M tokens."""
        return self.tokens(middle) / middle

    def __str__(self) -> str:
        return str(self.value) if isinstance(self.value, int) else f"{100 * self.value:g}%"


_WANTED = "give a share of the document such as 0.05 or 5%, at most 1.0, or a number of tokens such as 300"

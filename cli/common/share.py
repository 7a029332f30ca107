"""The value of an option that is a share, as a number or in percent."""

import typer


def share(text: str | float) -> float:
    """A share as `0.05` or `5%`; a project's file gives a number."""
    text = str(text)
    try:
        return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise typer.BadParameter(f"{text} is no share, such as 0.9 or 90%") from None

"""The value of an option that is a share, as a number or in percent."""

from decimal import Decimal, InvalidOperation

import typer


def share(text: str | float) -> float:
    """A share as `0.05` or `5%`; a project's file gives a number."""
    text = str(text).strip()
    try:
        # By decimal numbers, so that 2.9% is what 0.029 is.
        return float(Decimal(text[:-1]) / 100) if text.endswith("%") else float(text)
    except (ValueError, InvalidOperation):
        raise typer.BadParameter(f"{text or repr(text)} is no share, such as 0.9 or 90%") from None

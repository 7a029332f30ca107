"""Patterns for file names in an index: plain and at most one folder deep, so that none leads outside."""

_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}"

METHOD_NAME = rf"^{_PART}$"
FILE_NAME = rf"^({_PART}/)?{_PART}\.safetensors$"
"""For the name of a logical file, and for the path where it is stored below the index's folder."""

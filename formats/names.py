"""Names of the files of an index: plain ones, at most one folder deep, that lead nowhere else."""

_PART = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}"

METHOD_NAME = rf"^{_PART}$"
FILE_NAME = rf"^({_PART}/)?{_PART}\.safetensors$"
"""Of a logical file, and of the path where it lies below the index's folder."""

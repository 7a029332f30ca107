"""Environment variables that hide warnings of libraries."""

QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Set unless the user sets them, or asks for --debug."""

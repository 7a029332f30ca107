"""Tests with a real vLLM, which `make test-vllm` installs in an environment of its own."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]

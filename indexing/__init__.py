"""Offline half: capture queries, keys and values of a prefill, and build each method's index from them."""

import sparsekv.formats  # noqa: F401  # before torch, whose threads it tells how to wait

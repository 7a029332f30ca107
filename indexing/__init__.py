"""The offline half: capture queries, keys and values of a prefill, and build each method's index from them."""

import sparsekv.formats  # noqa: F401  # imported before torch: it limits how long OpenMP threads spin

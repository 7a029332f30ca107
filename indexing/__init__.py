"""Building of an index: a prefill captures queries, keys and values, and methods build tensors from them."""

import sparsekv.formats  # noqa: F401  # imported before torch: it limits how long OpenMP threads spin

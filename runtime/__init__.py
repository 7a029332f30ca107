"""Use of an index: opening it, sparse attention, one file per selection method, decoding, reports and tuning."""

import sparsekv.formats  # noqa: F401  # before torch, whose threads it tells how to wait

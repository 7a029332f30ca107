"""The online half: opening an index, sparse attention, one file per selection method, decoding, reports, tuning."""

import sparsekv.formats  # noqa: F401  # before torch, whose threads it tells how to wait

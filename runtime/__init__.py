"""Use of a finished index: opening, sparse decoding, serving, traces, reports, evaluation, benchmarks and tuning.

Each selection method is one file in `methods/`.
"""

import sparsekv.formats  # noqa: F401  # sets how OpenMP threads wait, before torch is loaded

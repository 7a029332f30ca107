"""The lowest package: the index on disk, documents, models, devices, processes that share a model, and errors.

The packages `indexing` and `runtime` import this package before torch. OpenMP threads' spin time is therefore set
here: it can only be set before torch is loaded.
"""

from sparsekv.formats.openmp import bound_spinning

bound_spinning()

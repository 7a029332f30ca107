"""The index on disk: schema, writer, reader and checksums. It does not depend on any model.

Every other package that uses torch imports this package first. The spin time of OpenMP threads is therefore set here,
before torch is loaded.
"""

from sparsekv.formats.openmp import bound_spinning

bound_spinning()

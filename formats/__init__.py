"""The artifact: schema, writer, reader, checksums. Does not depend on any model.

Every other package imports this one before torch, or nothing of ours: so threads of torch are told here how to wait.
"""

from sparsekv.formats.openmp import bound_spinning

bound_spinning()

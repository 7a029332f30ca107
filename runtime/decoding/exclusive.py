"""One thread at a time in a model: every answer, with the rewind before it and its figures, is one turn."""

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from sparsekv.formats.errors import SparsekvError, UsageError
from sparsekv.kernels.common.hook import all_alone, alone, called_back
from sparsekv.kernels.common.mask import UnsupportedAttentionError


@contextmanager
def exclusive(model: PreTrainedModel) -> Iterator[None]:
    """Within the context other threads that ask the model wait; this one may enter it again.

    Raises:
        UsageError: an answer's own callback asks, of this model or of another: two threads whose callbacks ask each
            other's model would wait for ever.
        SparsekvError: the model attends in a way that no index can follow, as other code of it may since the build.
    """
    _refuse_callback()
    with alone(model):
        try:
            yield
        except UnsupportedAttentionError as error:
            raise SparsekvError(str(error)) from error


@contextmanager
def exclusive_process() -> Iterator[None]:
    """Within the context other threads that ask any model wait. Raises what `exclusive` raises."""
    _refuse_callback()
    with all_alone():
        yield


def _refuse_callback() -> None:
    if called_back():
        raise UsageError(
            "an index was asked or opened by on_text or stop, within an answer; do it when that answer has come back"
        )

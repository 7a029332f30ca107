"""How many tokens a forward pass of a prefill takes."""

import torch

from sparsekv.indexing.plan import choose_chunk_size
from sparsekv.indexing.prefill.prefills import DensePrefill, QuokaPrefill

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_a_dense_prefill_gives_a_gpu_more_at_a_time() -> None:
    assert choose_chunk_size(None, GPU, DensePrefill()) > choose_chunk_size(None, CPU, DensePrefill())


def test_gpus_that_share_a_model_take_more_together() -> None:
    assert choose_chunk_size(None, GPU, DensePrefill(), 2) == 2 * choose_chunk_size(None, GPU, DensePrefill())
    assert choose_chunk_size(None, CPU, DensePrefill(), 2) == choose_chunk_size(None, CPU, DensePrefill())


def test_a_sparse_prefill_does_not_depend_on_the_device() -> None:
    assert choose_chunk_size(None, GPU, QuokaPrefill()) == choose_chunk_size(None, CPU, QuokaPrefill())


def test_what_is_asked_for_is_taken() -> None:
    assert choose_chunk_size(7, GPU, DensePrefill()) == choose_chunk_size(7, CPU, QuokaPrefill()) == 7

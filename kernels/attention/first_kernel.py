"""What a process pays once for Triton, paid while it waits for something else."""

import torch


def launch_first_kernel(device: torch.device) -> None:
    """Launch a small kernel on a GPU. Triton takes half a second for the first kernel of a process, whichever it is: it
    hashes itself to find what it compiled before."""
    from sparsekv.kernels.common.run_rows_triton import list_rows  # here, as a CPU needs no Triton

    with torch.cuda.device(device):
        one = torch.ones(1, 1, dtype=torch.int32, device=device)
        list_rows(one, one, torch.empty_like(one), 1)

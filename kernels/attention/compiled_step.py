"""Calls the compiled decode step with tensors; importing this compiles it, or raises ImportError without numba."""

import torch

from sparsekv.kernels.attention.cluster_step_numba import STEP
from sparsekv.kernels.attention.step_memory_numba import Job, run, scratch_size
from sparsekv.kernels.attention.types import StepTensors


class CompiledStep:
    """The compiled step over one layer's clusters; keeps their tensors, because the job has only their addresses.

    Args:
        clusters: float32 and contiguous, counts int32, starts int64.
    """

    def __init__(self, clusters: StepTensors):
        counted = clusters.counted
        self.clusters, (H, C, D) = clusters, counted.centroids.shape
        tensors = counted.centroids, counted.counts, counted.log_counts, clusters.starts, clusters.values
        self.job = Job(
            *(0 if tensor is None else tensor.data_ptr() for tensor in tensors),
            H=H,
            C=C,
            D=D,
            scale=clusters.softmax_scale,
            softcap=clusters.softcap or 0,
        )

    def attend(
        self,
        query: torch.Tensor,
        rows: tuple[torch.Tensor, torch.Tensor],
        exact: tuple[torch.Tensor, torch.Tensor],
        budget: int,
        replace: bool,
        sink_logits: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `attend_to_best`; float32, all contiguous except between the heads of rows.

        Copies the prepared job and sets what is new: making a job of thirty numbers takes ten times as long.
        """
        job, (H, G, D), threads = Job.from_buffer_copy(self.job), query.shape, torch.get_num_threads()
        (keys, values), (exact_keys, exact_values) = rows, exact
        E = exact_keys.shape[1]
        scratch = query.new_empty(scratch_size(H, G, D, job.C, budget + E, threads))
        output = query.new_empty(H, G, D)
        job.G, job.E, job.budget, job.replace = G, E, budget, replace
        job.query, job.scratch, job.output = query.data_ptr(), scratch.data_ptr(), output.data_ptr()
        job.keys, job.values = keys.data_ptr(), values.data_ptr()
        job.exact_keys, job.exact_values = exact_keys.data_ptr(), exact_values.data_ptr()
        job.key_step, job.value_step = 4 * keys.stride(0), 4 * values.stride(0)
        job.exact_key_step, job.exact_value_step = 4 * exact_keys.stride(0), 4 * exact_values.stride(0)
        if sink_logits is not None:
            job.sinks = sink_logits.data_ptr()
        run(STEP, job, threads)
        return output

"""Calls the compiled decode step over codes with tensors; importing this compiles it, or raises ImportError without
numba."""

import torch
from torch.nn.functional import pad

from sparsekv.kernels.attention.code_step_numba import CODES, STEP, CodeJob, scratch_size
from sparsekv.kernels.attention.lanes_numba import LANES
from sparsekv.kernels.attention.step_memory_numba import run
from sparsekv.kernels.attention.types import CodeTensors


class CompiledCodeStep:
    """The compiled step over one layer's codes; keeps their tensors, because the job has only their addresses.

    Args:
        codes: float32, codes uint8, labels and counts int32, all contiguous.
    """

    def __init__(self, codes: CodeTensors):
        (H, M, parts), C, D = codes.codes.shape, codes.counts.shape[1], codes.turn.shape[1]
        # A byte that names no centroid is an index that someone made: its row is there to be read.
        books = pad(codes.books, (0, 0, 0, CODES - codes.books.shape[2]))
        self.codes, self.books, size = codes, books, D // parts
        tensors = (
            codes.turn,
            books,
            codes.codes,
            codes.labels,
            codes.centroids,
            codes.counts,
            codes.masses,
            codes.values,
        )
        self.job = CodeJob(
            *(tensor.data_ptr() for tensor in tensors),
            H=H,
            M=M,
            C=C,
            D=D,
            parts=parts,
            size=size,
            scale=codes.softmax_scale,
            softcap=codes.softcap or 0,
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
        """See `attend_by_codes`; float32, all contiguous except between the heads of rows."""
        job, threads = self._job(query, budget), torch.get_num_threads()
        (keys, values), (exact_keys, exact_values) = rows, exact
        job.E, job.replace = exact_keys.shape[1], replace
        scratch = query.new_empty(scratch_size(job, threads))
        output = torch.empty_like(query)
        job.scratch, job.output = scratch.data_ptr(), output.data_ptr()
        job.keys, job.values = keys.data_ptr(), values.data_ptr()
        job.exact_keys, job.exact_values = exact_keys.data_ptr(), exact_values.data_ptr()
        job.key_step, job.value_step = 4 * keys.stride(0), 4 * values.stride(0)
        job.exact_key_step, job.exact_value_step = 4 * exact_keys.stride(0), 4 * exact_values.stride(0)
        if sink_logits is not None:
            job.sinks = sink_logits.data_ptr()
        run(STEP, job, threads)
        return output

    def choose(self, query: torch.Tensor, beside: torch.Tensor, budget: int) -> torch.Tensor:
        """See `choose_by_codes`; float32, contiguous."""
        job, threads, (H, M) = self._job(query, budget), torch.get_num_threads(), self.codes.codes.shape[:2]
        scratch = query.new_empty(scratch_size(job, threads))
        job.scratch, job.exact_keys, job.sinks = scratch.data_ptr(), query.data_ptr(), beside.data_ptr()
        run(STEP, job, threads)
        # As `lay_out` has it: the keys that are found come after the scores.
        return scratch.view(torch.int32)[H * M : 2 * H * M].view(H, M)[:, :budget]

    def _job(self, query: torch.Tensor, budget: int) -> CodeJob:
        job, G = CodeJob.from_buffer_copy(self.job), query.shape[1]
        job.query, job.G, job.fours, job.budget = query.data_ptr(), G, -(-G // LANES), budget
        return job

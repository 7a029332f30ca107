"""RMS norms of a loaded model in one compiled call, for decode steps on a CPU.

`compile_norms` replaces the norms. transformers computes a norm by eight torch operations, which take as long for one
row as a small matrix product.
"""

import ctypes
import sys
from inspect import signature
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.functional import rms_norm
from transformers import PreTrainedModel

from sparsekv.kernels.attention.cluster_step import compiled_kernels

FEW = 16
"""Maximum number of rows of a compiled call, which runs on one thread."""
NAMES_OF_EPS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
"""Attributes in which transformers' norms have their epsilon."""
SCALES = (1e-3, 1.0, 100.0)
"""Magnitudes of the random rows on which a norm is compared with the formula; epsilon counts in the smallest."""
CLOSE = 2e-6
"""Maximum relative difference from the formula: some norms round their sums in another order."""


class CompiledNorm(nn.Module):
    """An RMS norm: rows [..., D] over their root mean square, times the weights.

    Args:
        weight: [D] float32.
        eps: added to the mean square.
        offset: added to the weights; 1 in Gemma's norms.
    """

    def __init__(self, weight: nn.Parameter, eps: float, offset: float, kernel: ModuleType):
        super().__init__()
        self.weight, self.eps, self.offset, self.channels = weight, eps, offset, len(weight)
        # The job has no addresses, so that a copy of this module does not read the original's weights.
        self._job = kernel.Job(D=len(weight), eps=eps, offset=offset)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        by_torch = torch.compiler.is_compiling() or torch.is_grad_enabled() or not self._takes(hidden_states)
        kernel = None if by_torch else compiled_kernels("rms_norm_numba", "linear")
        if kernel is None:
            return formula(hidden_states, self.weight, self.eps, self.offset)
        rows, job = hidden_states.contiguous(), type(self._job).from_buffer_copy(self._job)
        output = torch.empty_like(rows)
        job.rows, job.weight, job.output = rows.data_ptr(), self.weight.data_ptr(), output.data_ptr()
        job.R = rows.numel() // self.channels
        kernel.CALL(ctypes.addressof(job))
        return output

    def _takes(self, rows: torch.Tensor) -> bool:
        few = rows.shape[-1] == self.channels and rows.numel() <= FEW * self.channels
        return few and rows.dtype == torch.float32 and rows.is_cpu

    def extra_repr(self) -> str:
        return f"({self.channels},), eps={self.eps}"


def formula(rows: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """Compute the RMS norm of rows [..., D] with weights [D], to which `offset` is added, by torch operations."""
    return rms_norm(rows, weight.shape, weight + offset if offset else weight, eps)


@torch.no_grad()
def compile_norms(model: PreTrainedModel) -> int:
    """Replace a model's float32 RMS norms on a CPU by `CompiledNorm`; return their number.

    A norm is replaced only if its output on random rows is that of the formula. All other modules stay. The new modules
    share the norms' parameters under the same names. Nothing is replaced in a process that has not imported numba,
    because the import takes longer than the replaced norms save in a short answer.
    """
    kernel = compiled_kernels("rms_norm_numba", "linear") if "numba" in sys.modules else None
    found = [] if kernel is None else [(name, one) for name, one in model.named_modules() if _may_be_norm(one)]
    replaced = 0
    for name, module in found:
        made = _compiled(module, kernel)
        if made is not None:
            model.set_submodule(name, made)
            replaced += 1
    return replaced


def _may_be_norm(module: nn.Module) -> bool:
    """Whether a module takes one tensor, and has one vector of float32 weights on the CPU and no hooks."""
    if "RMSNorm" not in type(module).__name__ or len(signature(type(module).forward).parameters) != 2:
        return False
    parameters, held = [*module.named_parameters()], (*module.children(), *module.buffers())
    if held or [name for name, _ in parameters] != ["weight"]:
        return False
    weight = parameters[0][1]
    plain = type(weight) is nn.Parameter and weight.dim() == 1 and weight.is_contiguous()
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return plain and not hooked and weight.dtype == torch.float32 and weight.is_cpu


def _compiled(module: nn.Module, kernel: Any) -> CompiledNorm | None:
    """Return the compiled norm that replaces a module; None if the module computes something else."""
    eps = next((found for name in NAMES_OF_EPS if isinstance(found := getattr(module, name, None), float)), None)
    if eps is None:
        return None
    weight: Any = module.weight
    random = torch.Generator().manual_seed(0)
    rows = torch.randn(len(SCALES), 2, len(weight), generator=random) * torch.tensor(SCALES)[:, None, None]
    output = module(rows)
    for offset in (0.0, 1.0):
        expected = formula(rows, weight, eps, offset)
        if output.shape == expected.shape and torch.allclose(output, expected, rtol=CLOSE, atol=0):
            return CompiledNorm(weight, eps, offset, kernel)
    return None

"""A definition in plain torch and the kernel that replaces it on a GPU: both exist, and take the same arguments."""

import importlib
import inspect
import pkgutil
from collections.abc import Callable

import pytest
import torch

from sparsekv import kernels
from sparsekv.kernels.common.on_gpu import WithKernel, on_gpu
from sparsekv.kernels.posting_lists.list_ranks import rank_rows


def decorated() -> dict[str, WithKernel]:
    """All decorated definitions, by name."""
    names = [found.name for found in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")]
    plain = [importlib.import_module(name) for name in names if not name.endswith(("_triton", "_numba"))]
    return {name: each for module in plain for name, each in vars(module).items() if isinstance(each, WithKernel)}


DECORATED = decorated()


def arguments(of: Callable[..., object]) -> list[tuple[str, object, object]]:
    """Names, kinds and defaults."""
    return [(one.name, one.kind, one.default) for one in inspect.signature(of).parameters.values()]


@pytest.mark.parametrize("name", DECORATED)
def test_the_kernel_takes_the_arguments_of_its_definition(name: str) -> None:
    """In the same order, with the same defaults; what types they have the definition says. It may take more, which has
    defaults."""
    definition, kernel = (arguments(of) for of in (DECORATED[name].reference, DECORATED[name].kernel))
    assert kernel[: len(definition)] == definition
    assert all(default is not inspect.Parameter.empty for _, _, default in kernel[len(definition) :])


def test_a_definition_keeps_its_name_and_text() -> None:
    assert rank_rows.__name__ == "rank_rows"
    assert rank_rows.__doc__ == rank_rows.reference.__doc__
    assert list(inspect.signature(rank_rows).parameters)[:2] == ["query", "keys"]


def test_on_a_cpu_the_definition_runs_and_no_kernel_is_imported() -> None:
    @on_gpu("no_such_module:kernel")
    def doubled(rows: torch.Tensor, *, times: int = 2) -> torch.Tensor:
        return rows * times

    assert torch.equal(doubled(torch.ones(3), times=4), torch.full((3,), 4.0))
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        _ = doubled.kernel

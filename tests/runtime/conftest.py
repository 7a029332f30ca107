"""Small indices of every family, built once for all tests of a run that ask for them."""

import pytest
import torch
from support.small_index import INDEXERS, SmallIndices, build_small, reopen, small_plan
from support.tiny_models import FAMILIES_OF_STEPS

from sparsekv.indexing.build import build_index
from sparsekv.runtime.decoding.open import OpenIndex


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallIndices:
    """Small indices to be copied."""
    return SmallIndices(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def index(tmp_path_factory: pytest.TempPathFactory) -> OpenIndex:
    """A small index of the tiny llama."""
    return build_small(tmp_path_factory.mktemp("llama") / "small.skv")


@pytest.fixture(scope="session")
def full_index(tmp_path_factory: pytest.TempPathFactory) -> OpenIndex:
    """The tiny llama's, with the tensors of every method."""
    return build_small(tmp_path_factory.mktemp("full") / "full.skv", methods=INDEXERS)


@pytest.fixture(scope="session", params=FAMILIES_OF_STEPS)
def family_index(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenIndex:
    """A small index of each family in turn."""
    return build_small(tmp_path_factory.mktemp(request.param) / "small.skv", request.param)


@pytest.fixture(scope="session", params=[torch.bfloat16, torch.float16], ids=str)
def half_index(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenIndex:
    """A small index of the tiny llama in half precision."""
    plan, folder = small_plan(), tmp_path_factory.mktemp("half") / "small.skv"
    plan.loaded.model.to(request.param)
    build_index(plan, folder)
    return reopen(plan, folder)

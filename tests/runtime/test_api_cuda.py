"""The Python API on a GPU: threads that ask one model, whose steps are captured."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.small_index import build_small, reopen, small_plan

from sparsekv.runtime.api import Index
from sparsekv.runtime.decoding.answer import Sampling

pytestmark = pytest.mark.gpu


def test_threads_wait_for_each_other(tmp_path: Path) -> None:
    build_small(tmp_path / "small.skv")
    plan = small_plan()
    plan.loaded.model.cuda()
    index = Index(reopen(plan, tmp_path / "small.skv"))
    questions = [f"What is line {number}?" for number in range(4)]
    alone = [index.ask(one, Sampling(12), budget="10%").ids for one in questions]
    with ThreadPoolExecutor(3) as threads:
        together = list(threads.map(lambda one: index.ask(one, Sampling(12), budget="10%").ids, questions * 2))
    assert together == alone * 2

"""An interrupted prefill on a GPU goes on from its last whole chunk, and gives the rows of one that was not."""

from pathlib import Path

import pytest
import torch
from support.small_index import INDEXERS, prefilled, recorded_attention, small_plan

from sparsekv.formats.index.reader import Artifact
from sparsekv.indexing.build import build_index

pytestmark = pytest.mark.gpu
CHUNK, TOKENS = 64, 300


def test_it_goes_on_after_an_exception(tmp_path: Path) -> None:
    methods = {name: INDEXERS[name] for name in ("multipole", "codes")}
    plan = small_plan(tokens=TOKENS, methods=methods, chunk_size=CHUNK)
    plan.loaded.model.to("cuda")  # type: ignore[arg-type]  # transformers wraps torch's own `to`
    build_index(plan, tmp_path / "fresh.skv")

    def stop(stage: str, done: int, of: int) -> None:
        if done == 3 * CHUNK:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_index(plan, tmp_path / "b.skv", stop)
    with recorded_attention(plan.loaded.model) as outputs:
        build_index(plan, tmp_path / "b.skv")
    assert prefilled(outputs) == len(plan.prompt.input_ids) - 3 * CHUNK
    fresh, again = (Artifact(tmp_path / name) for name in ("fresh.skv", "b.skv"))
    for layer in fresh.manifest.attending:
        for one, other in zip(fresh.context(layer), again.context(layer), strict=True):
            torch.testing.assert_close(one, other)

"""`eval` names the tasks of which dense attention answers nothing rightly: no method can lose anything there."""

from dataclasses import replace

import pytest

from sparsekv.cli.evaluating.output import note_wrong_baselines
from sparsekv.runtime.evaluation.table import Score

NONE = Score(
    task="sums", length=2048, turn=None, tokens=2000.0, prefill="dense", method="dense", variant="", budget=None,
    metric="has-number", unit="%", contexts=2, questions=8, score=0.0, score_low=0.0, score_high=0.0, difference=None,
    difference_low=None, difference_high=None, same_as_dense=None, kv_fraction=1.0, seconds=1.0,
)  # fmt: skip


def test_a_task_without_right_answers_of_dense_attention_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    sparse = replace(NONE, method="codes", budget=0.05, difference=0.0, same_as_dense=100.0)
    right = replace(NONE, task="niah-facts", score=50.0)
    note_wrong_baselines(
        [NONE, sparse, right, replace(right, method="codes", score=0.0, difference=-50.0)], quiet=False
    )
    assert " ".join(capsys.readouterr().err.split()) == (
        "dense attention has 0% in sums of 2,048 tokens, so no row there shows a method's loss; take a larger model or "
        "an easier task"
    )
    note_wrong_baselines([NONE], cut=True, quiet=False)
    assert "; take a larger --max-new-tokens, a larger model or an easier task" in " ".join(
        capsys.readouterr().err.split()
    )
    note_wrong_baselines([right], quiet=False)
    note_wrong_baselines([NONE], quiet=True)
    assert capsys.readouterr().err == ""

"""Tests of the tool's promises on 1,024 tokens of a real document, or 6,144 if slow, with the embedded model."""

import json
from copy import deepcopy
from typing import Any

import pytest
import torch
from filelock import FileLock
from support.command import sparsekv
from support.configs import sparse
from support.reference import assert_close
from transformers import DynamicCache

from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.models.load import LoadedModel, identify
from sparsekv.kernels.common.hook import route_attention
from sparsekv.runtime.decoding.answer import Sampling, question_ids
from sparsekv.runtime.decoding.engine import generate
from sparsekv.runtime.decoding.open import OpenIndex, open_index
from sparsekv.runtime.selection.interface import Budget, methods

QUESTION = "Which statement raises an exception?"
REPORTS = (
    ("--method", "squeezed", "--lookup", "flat"),
    [option for method in ("multipole", "quest", "oracle", "window") for option in ("--method", method)],
)
"""Options of the two reports from which the figures below are; squeezed has one of its lookups."""
SQUEEZED = "squeezed lookup=flat"


@pytest.fixture(scope="module", params=["index", pytest.param("long_index", marks=pytest.mark.slow)])
def name(request: pytest.FixtureRequest) -> str:
    """The index that a test is of."""
    found: str = request.param
    return found


@pytest.fixture
def artifact(name: str, request: pytest.FixtureRequest) -> Artifact:
    found: Artifact = request.getfixturevalue(name)
    return found


@pytest.fixture
def opened(artifact: Artifact, embedded: LoadedModel) -> OpenIndex:
    return open_index(artifact, embedded.model, embedded.tokenizer, identify(embedded))


@pytest.fixture
def report(artifact: Artifact) -> dict[str, Any]:
    """At 5%, with and without a residual; measured once for all workers."""
    path = artifact.folder.with_suffix(".json")
    command = ("recall-report", "-i", artifact.folder, "--budget", "5%", "--residual", "--json")
    with FileLock(f"{path}.lock"):
        if not path.exists():
            done = [sparsekv(*command, *methods, cwd=path.parent) for methods in REPORTS]
            assert [one.returncode for one in done] == [0, 0], done
            first, second = (json.loads(one.stdout) for one in done)
            path.write_text(json.dumps(first | {"rows": first["rows"] + second["rows"]}), encoding="utf-8")
    read: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return read


def _by_name(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f"{row['method']} {row['variant']}".strip(): row for row in report["rows"]}


def test_recall_at_five_percent(report: dict[str, Any], name: str) -> None:
    rows = _by_name(report)
    assert all(row["layer"] is None and row["kv_head"] is None for row in report["rows"])
    squeezed, quest, oracle, window = (rows[one] for one in (SQUEEZED, "quest", "oracle", "window"))
    multipole, without = rows["multipole flat"], rows["multipole flat without replacement"]
    assert oracle["recall"] == 1
    if name == "long_index":
        assert report["n_context"] == 6144 + 24
        assert squeezed["recall"] >= 0.57
        assert squeezed["output_error"] <= 0.08
        assert multipole["recall"] >= 0.59
        assert multipole["output_error"] <= 0.048
        assert quest["recall"] == pytest.approx(0.33, abs=0.04)
        assert quest["output_error"] == pytest.approx(0.135, abs=0.015)
        assert oracle["output_error"] == pytest.approx(0.046, abs=0.002)
        assert window["output_error"] == pytest.approx(0.59, abs=0.01)
        assert without["output_error"] == pytest.approx(0.075, abs=0.004)
    else:
        assert report["n_context"] == 1024 + 24
        assert squeezed["recall"] >= 0.38
        assert squeezed["output_error"] <= 0.155
        assert multipole["recall"] >= 0.40
        assert multipole["output_error"] <= 0.089
        assert quest["recall"] == pytest.approx(0.18, abs=0.02)
        assert quest["output_error"] == pytest.approx(0.236, abs=0.015)
        assert oracle["output_error"] == pytest.approx(0.094, abs=0.003)
        assert window["output_error"] == pytest.approx(0.518, abs=0.01)
        assert without["output_error"] == pytest.approx(0.146, abs=0.006)
    assert squeezed["recall"] > quest["recall"]
    assert squeezed["output_error"] < quest["output_error"]
    assert squeezed["kv_fraction"] < quest["kv_fraction"]


def test_centroids_in_the_place_of_tokens_at_five_percent(report: dict[str, Any]) -> None:
    """Multipole's clusters beat the exact best tokens without them, and serve every other method's remainder too."""
    rows = _by_name(report)
    multipole, without = rows["multipole flat"], rows["multipole flat without replacement"]
    assert multipole["output_error"] < rows["oracle"]["output_error"]
    assert without["recall"] == multipole["recall"]
    assert multipole["kv_fraction"] == pytest.approx(0.05 + 2 / 16 / 2, abs=0.001)
    for name, share in ((SQUEEZED, 1 / 3), ("quest", 1 / 5), ("oracle", 1 / 2), ("window", 1 / 2)):
        less = rows[name]["output_error"] - rows[f"{name} + residual"]["output_error"]
        assert less >= share * rows[name]["output_error"], name
        assert rows[f"{name} + residual"]["recall"] == rows[name]["recall"]
    assert rows["oracle + residual"]["output_error"] < multipole["output_error"]


def test_everything_is_dense_attention(opened: OpenIndex) -> None:
    """At budget 100% the text is transformers' own, and so are the logits of every token of it."""
    model, question = opened.model, question_ids(opened, QUESTION)
    prompt = torch.cat([opened.input_ids, question])[None]
    document = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=opened.input_ids[None], past_key_values=document, logits_to_keep=1)
    plain = model.generate(
        prompt,
        past_key_values=deepcopy(document),
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=16,
        do_sample=False,
    )
    cache = opened.cache(sparse("squeezed", methods()["squeezed"](), Budget(1.0)))
    answer = generate(opened, cache, question, Sampling(max_new_tokens=16))
    assert answer.generated_tokens > 10
    new = plain[0, prompt.shape[1] :]
    assert answer.text == opened.tokenizer.decode(new, skip_special_tokens=True)
    assert answer.kv_fraction >= 1
    cache.rewind()
    followed = torch.cat([question, new])
    with torch.inference_mode():
        dense = model(input_ids=followed[None], past_key_values=document).logits[0]
        with route_attention(model, cache.attend):
            stepped = [model(input_ids=question[None], past_key_values=cache, use_cache=True).logits[0]]
            stepped += [model(input_ids=token.view(1, 1), past_key_values=cache).logits[0] for token in new]
    assert_close(torch.cat(stepped), dense, 1e-4)
    assert float((torch.cat(stepped) - dense).abs().max() / dense.abs().max()) <= 1e-4


def test_a_second_question_prefills_only_itself(opened: OpenIndex) -> None:
    """The same cache answers again as a fresh one would, and reads a tenth and its index at most."""
    cache = opened.cache(sparse("squeezed", methods()["squeezed"](), Budget(0.05)))
    first = generate(opened, cache, question_ids(opened, QUESTION), Sampling(max_new_tokens=12))
    other = generate(opened, cache, question_ids(opened, "What is a lambda?"), Sampling(max_new_tokens=12))
    again = generate(opened, cache, question_ids(opened, QUESTION), Sampling(max_new_tokens=12))
    assert first.text == again.text != other.text
    assert 0.05 < again.kv_fraction < 0.1

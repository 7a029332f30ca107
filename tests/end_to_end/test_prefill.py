"""Sparse prefills with the real model: of a document, of a question, and what the model then predicts."""

import json
from pathlib import Path

import pytest
from support.command import sparsekv
from support.prefill_perplexity import prefill_perplexity

from sparsekv.formats.documents.prompt import encode_prompt
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.models.load import LoadedModel
from sparsekv.indexing.prefill.prefills import (
    DensePrefill,
    KeyDiffPrefill,
    Prefill,
    QuokaPrefill,
    SampleAttentionPrefill,
)


def test_a_document_is_prefilled_sparsely_asked_and_reported_so(
    embedded_folder: Path, document: Path, tmp_path: Path
) -> None:
    how = ("--prefill", "quoka", "--prefill-budget", "128", "--chunk-size", "64")
    built = sparsekv(
        "build-index", document, "-o", "q.skv", "--max-tokens", "400", "--method", "squeezed", *how, cwd=tmp_path
    )
    assert built.returncode == 0, built.stderr
    prefill = Artifact(tmp_path / "q.skv").manifest.prefill
    assert (prefill.kind, prefill.chunk_size, prefill.parameters["prefill_budget"]) == ("quoka", 64, 128)

    # Opening it recomputes the probe, which a context that differs from the stored one would fail.
    question = ("generate", "--index", "q.skv", "Which statement is this about?", "--max-new-tokens", "4", "--json")
    asked = sparsekv(*question, "--prefill", "quoka", "--prefill-budget", "10%", cwd=tmp_path)
    assert asked.returncode == 0, asked.stderr
    assert json.loads(asked.stdout)["generated_tokens"] <= 4

    report = sparsekv("recall-report", "--index", "q.skv", "--method", "window", "--json", cwd=tmp_path)
    assert json.loads(report.stdout)["prefill"].startswith("quoka (chunks of 64, ")


@pytest.mark.slow
def test_a_dense_question_answers_as_a_dense_model_does(index: Artifact) -> None:
    question = ("generate", "--index", index.folder, "What is an assert statement?", "--max-new-tokens", "8")
    whole = sparsekv(*question, "--budget", "100%", "--prefill", "own", cwd=index.folder.parent)
    dense = sparsekv(*question, "--budget", "100%", cwd=index.folder.parent)
    assert whole.returncode == dense.returncode == 0, dense.stderr
    assert whole.stdout == dense.stdout


@pytest.mark.slow
def test_quoka_keeps_the_perplexity_of_a_long_text(embedded: LoadedModel, document: Path) -> None:
    """8,192 tokens of the document's middle, where little is copied from far away."""
    text = document.read_text(encoding="utf-8")
    input_ids = encode_prompt(embedded.tokenizer, text, raw=True).input_ids[60_000:68_192]

    def measured(prefill: Prefill, chunk_size: int = 128) -> float:
        return prefill_perplexity(embedded.model, input_ids, prefill, last=1024, chunk_size=chunk_size)

    quoka = measured(QuokaPrefill())
    assert quoka < 1.05 * measured(DensePrefill(), chunk_size=512)
    assert quoka < measured(SampleAttentionPrefill())
    assert quoka < measured(KeyDiffPrefill())
    assert quoka < measured(QuokaPrefill(quoka_similarity="dot"))
    assert quoka < measured(QuokaPrefill(quoka_across="mean"))

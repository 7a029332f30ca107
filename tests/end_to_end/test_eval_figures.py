"""Tests of the evaluation of the real model at 4,096 tokens: the default task can tell methods apart."""

import json
from pathlib import Path

import pytest
from support.command import sparsekv


@pytest.mark.slow
def test_facts_are_found_by_dense_attention_and_not_by_the_tail_alone(
    embedded_folder: Path, document: Path, tmp_path: Path
) -> None:
    ways = ("--method", "oracle", "--method", "window", "--budget", "10%")
    done = sparsekv("eval", document, "--raw", "--contexts", "2", *ways, "--json", "--work", "work", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    dense, oracle, window = json.loads(done.stdout)["rows"]
    assert (dense["task"], dense["length"], dense["questions"]) == ("niah-facts", 4096, 10)
    assert dense["score"] >= 60
    assert oracle["difference"] >= -30
    assert window["score"] <= 10
    assert window["difference_high"] < 0

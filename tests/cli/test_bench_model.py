"""`bench-model` as a person runs it, with a model so small that its times mean nothing."""

import json
from pathlib import Path

import pytest
import torch
from support.command import run_here
from support.tiny_models import FAMILIES
from transformers import AutoModelForCausalLM

from sparsekv.runtime.benchmark.settings import CONFIGS
from sparsekv.runtime.selection.interface import Budget


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configs of tiny models, a folder each."""
    place = tmp_path_factory.mktemp("configs")
    for family in ("qwen3", "gemma2"):
        FAMILIES[family]().config.save_pretrained(place / family)
    return place


def test_dense_and_methods_in_tokens_a_second(folders: Path) -> None:
    options = ("--context", "600", "--batch", "2", "--method", "multipole", "--method", "keydiff", "--budget", "10%")
    outcome = run_here("bench-model", "--config", str(folders / "qwen3"), *options, "--runs", "4", "--json", "-q")
    assert outcome.code == 0, outcome.stderr
    found = json.loads(outcome.stdout)
    assert (found["layers"], found["distinct_layers"], found["heads"], found["kv_heads"]) == (3, 2, 4, 2)
    rows = {f"{row['method']} {row['variant']}".strip(): row for row in found["rows"]}
    dense = next(name for name in rows if name.startswith("dense sdpa"))
    assert list(rows) == [dense, "dense sparsekv", "no attention", "multipole", "keydiff"]
    for row in rows.values():
        assert row["lower_ms"] <= row["median_ms"] <= row["upper_ms"]
        # Of two sequences; over all four steps, of which the quartiles leave the fastest and the slowest out.
        assert 0 < row["tokens_per_second"] < 2 * 1000 / (row["lower_ms"] / 2)
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / rows[dense]["tokens_per_second"])
        assert row["timed"] == "wall clock"
    middle = 600 - 10 - 128
    assert rows["keydiff"]["kv_fraction"] == pytest.approx(Budget(0.1).tokens(middle) / middle)
    assert rows["multipole"]["kv_fraction"] > rows["keydiff"]["kv_fraction"]


def test_questions_over_one_document(folders: Path) -> None:
    config = ("--config", str(folders / "qwen3"), "--context", "600", "--runs", "2", "-q")
    outcome = run_here(
        "bench-model", *config, "--shared", "--batch", "3", "--method", "multipole", "--method", "magicpig"
    )
    assert outcome.code == 1
    assert "a batch over one document" in " ".join(outcome.stdout.split())
    assert "multipole" in outcome.stdout
    assert "magicpig" not in outcome.stdout
    assert "a model's step with MagicPIG cannot be shared: each question represents" in outcome.stderr


def test_a_table_says_that_layers_take_turns(folders: Path) -> None:
    options = ("--context", "600", "--method", "window", "--distinct-layers", "1", "--runs", "2", "-q")
    outcome = run_here("bench-model", "--config", str(folders / "qwen3"), *options)
    assert outcome.code == 0, outcome.stderr
    said = " ".join(outcome.stdout.split())
    assert "3 layers that take turns with the keys and values of 1," in said
    assert "no attention" in said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--config", "none"), ("--config none", "qwen3-8b", "config.json")),
        (("--config", "gemma2"), ("gemma2", "windows or a soft cap")),
        (("--config", "qwen3", "--distinct-layers", "0"), ("--distinct-layers 0", "1 to 3")),
        (
            ("--config", "qwen3", "--method", "codes", "--code-bytes", "5"),
            ("--code-bytes 5", "divisor"),
        ),
        (("--shared",), ("--shared", "--batch 16")),
        (("--config", "qwen3", "--context", "100"), ("--context 100", "at least 512")),
        (("--config", "qwen3", "--runs", "1"), ("--runs 1", "at least 2")),
        (("--config", "qwen3", "--dtype", "int3"), ("--dtype int3", "float32")),
        (("--config", "qwen3", "--method", "quest", "--lookup", "flat"), ("--lookup", "quest")),
    ],
    ids=" ".join,
)
def test_usage(folders: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], says: tuple[str, ...]) -> None:
    monkeypatch.chdir(folders)
    outcome = run_here("bench-model", "-q", *options)
    assert outcome.code == 2, outcome.stderr
    for part in says:
        assert part in outcome.error()


@pytest.mark.parametrize(
    ("options", "now"),
    [
        (("--end-to-end", "--context", "1K"), "`sparsekv bench-model --context 1K`"),
        (("--config", "bench", "--end-to-end"), "`sparsekv bench-model --config bench`"),
        (("-q", "--compile=on"), "`sparsekv bench-model -q --compile=on`"),
    ],
    ids=" ".join,
)
def test_the_options_that_bench_had_name_this_command(options: tuple[str, ...], now: str) -> None:
    outcome = run_here("bench", *options)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert outcome.error() == f"a whole model's steps are timed by a command of their own: {now}"


def test_a_project_file_with_an_option_that_bench_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sparsekv.toml").write_text("[bench]\nbatch = 2\nend-to-end = true\n")
    assert "sparsekv.toml, line 3: bench has no option end-to-end any more: it belongs under [bench-model];" in (
        run_here("bench", "-q").error()
    )


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("qwen3-8b", 8_190_735_360), ("llama-3.1-8b", 8_030_261_248), ("smollm2-135m", 134_515_008)],
)
def test_named_configs_are_as_big_as_what_they_are_named_after(name: str, parameters: int) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    assert sum(one.numel() for one in model.parameters()) == parameters

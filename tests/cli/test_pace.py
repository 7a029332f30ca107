"""A build says before its prefill how long it takes, from the last one of the same model on this machine."""

import json
import shutil
from pathlib import Path

import pytest
from support.command import fails, run_here

from sparsekv.cli.building.pace import Pace, PaceMeter
from sparsekv.formats.documents.prompt import encode_prompt
from sparsekv.formats.models.load import load_model
from sparsekv.indexing.plan import BuildConfig, BuildPlan

HOW = ("--model", "model", "--method", "squeezed", "--tail", "32")


def _steps(pace: Pace, ends: list[int]) -> list[tuple[float, int]]:
    return [(pace.seconds(0, end), end) for end in ends]


@pytest.mark.parametrize(
    "ends", [[0, 512, 1024, 1536, 1700], [512, 1024, 1536, 2048]], ids=["whole", "behind a prefix"]
)
def test_a_longer_document_is_estimated_with_its_pairs(ends: list[int]) -> None:
    pace = Pace(2e-3, 3e-7)
    fitted = Pace.fitted(_steps(pace, ends), ratio=1.0)
    assert fitted.seconds(0, 100_000) == pytest.approx(pace.seconds(0, 100_000))


def test_few_chunks_are_told_apart_by_a_ratio() -> None:
    pace = Pace(2e-3, 3e-7)
    for ends in ([0, 700], [0, 512, 700]):
        assert Pace.fitted(_steps(pace, ends), ratio=1.5e-4).seconds(0, 9000) == pytest.approx(pace.seconds(0, 9000))


def test_pairs_never_make_a_prefill_shorter() -> None:
    steps = [(0.0, 0), (4.0, 512), (6.0, 1024), (7.0, 1536), (7.5, 2048)]  # the first chunks wait for the disk
    assert Pace.fitted(steps, ratio=1e-4).seconds(0, 50_000) > 7.5 * 50_000 / 2048


def test_without_an_earlier_prefill_one_layer_is_timed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which the layer's 256 rows take a second."""
    monkeypatch.setenv("SPARSEKV_CACHE", str(place / "cache"))
    loaded = load_model("model", dtype="float32")
    plan = BuildPlan(loaded, encode_prompt(loaded.tokenizer, "A document. " * 80), BuildConfig({}))
    meter = PaceMeter(plan, iter([0.0, 1.0]).__next__)
    layers = sum(weight.numel() for name, weight in loaded.model.named_parameters() if name.endswith("proj.weight"))
    largest = max(weight.numel() for name, weight in loaded.model.named_parameters() if name.endswith("proj.weight"))
    pairs = 4 * 3 * 4 * 16 / (2 * layers)  # operations of 3 layers of 4 heads of 16 channels
    seconds = layers / largest / 256 * (30_000 + pairs * 30_000**2 / 2)
    assert meter.told(0, 30_000) == f"roughly {seconds / 60:.0f} min of prefill here, judged by one layer"


def test_the_estimate_is_told_and_corrected(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEKV_CACHE", str(place / "cache"))
    file = place / "cache" / "prefill_pace.json"

    def build(name: str) -> str:
        (place / f"{name}.txt").write_text(f"{name} is a document. " * 80)
        built = run_here("build-index", f"{name}.txt", *HOW, "--force")
        assert built.code == 0, built.stderr
        return built.stderr

    assert " of prefill here" not in build("first")
    paces = json.loads(file.read_text())
    assert len(paces) == 1
    for damaged in ("{", "[1]", json.dumps({key: [-1, "x"] for key in paces}), json.dumps(dict.fromkeys(paces, "1"))):
        file.write_text(damaged)
        assert " of prefill here" not in build("again")
    file.write_text(json.dumps({key: [1.0, 0.0] for key in paces}))
    told = build("second")
    tokens = int(told.partition(" tokens with")[0].rpartition("indexing ")[2].replace(",", ""))
    assert f"; about {tokens / 60:.0f} min of prefill here\n" in told
    assert " of prefill here" not in build("third")


def test_a_long_text_is_refused_before_the_weights_are_read(place: Path) -> None:
    (place / "long.txt").write_text("words " * 6000)
    shutil.copytree("model", "no-weights", ignore=shutil.ignore_patterns("*.safetensors"))
    says = ("tokens, and ", "no-weights has 4,096 positions; shorten it with --max-tokens 3800")
    fails(2, "build-index", "long.txt", "--model", "no-weights", "-q", says=says)

"""Tests of the report of `inspect` on an index's clusters and lists, against the tensors that the index holds."""

import json
import math
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.clusters import spread_by_definition, token_labels
from support.command import run_here
from support.sealing import Fields, change_tensors, reseal

from sparsekv.formats.index.reader import Artifact
from sparsekv.kernels.kmeans.hierarchy import block_offsets

BLOCK = 256
PNG = b"\x89PNG"


@pytest.fixture
def blocks(place: Path) -> Artifact:
    """The document with several blocks of multipole's clusters in two levels, as `blocks.skv`."""
    options = ("--method", "multipole", "--block", str(BLOCK), "--levels", "0.125,0.03", "-o", "blocks.skv", "-q")
    outcome = run_here("build-index", "doc.txt", "--model", "model", *options)
    assert outcome.code == 0, outcome.stderr
    return Artifact(place / "blocks.skv")


@pytest.fixture(scope="module")
def with_lists(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`doc.skv` with csattention's lists too, to be copied, never changed."""
    folder = tmp_path_factory.mktemp("lists") / "doc.skv"
    shutil.copytree(built / "doc.skv", folder)
    build = ("build-index", built / "doc.txt", "-o", folder, "--model", built / "model", "--method", "csattention")
    outcome = run_here(*build, "--method", "squeezed", "--subspace-size", "8", "--centroids", "8", "-q")
    assert outcome.code == 0, outcome.stderr
    return folder


@pytest.fixture
def lists(place: Path, with_lists: Path) -> Artifact:
    """The document with squeezed's clusters and csattention's lists, as `doc.skv`."""
    shutil.rmtree(place / "doc.skv")
    shutil.copytree(with_lists, place / "doc.skv")
    return Artifact(place / "doc.skv")


def test_json_has_null_for_what_a_stranger_wrote_in_the_place_of_a_number(place: Path) -> None:
    def change(fields: Fields) -> None:
        fields["methods"]["squeezed"]["parameters"]["x"] = math.inf

    reseal(place / "doc.skv", change)
    outcome = run_here("inspect", "--json", "--html", "page.html", "-q")
    assert outcome.code == 0, outcome.stderr
    found = json.loads(outcome.stdout, parse_constant=pytest.fail)
    assert found["methods"]["squeezed"]["parameters"]["x"] is None
    page = (place / "page.html").read_text().split('id="data">')[1].split("</script>")[0]
    assert json.loads(page, parse_constant=pytest.fail)["inspection"] == found


def test_json_has_each_layers_lists_beside_the_other_methods_clusters(lists: Artifact) -> None:
    outcome = run_here("inspect", "--json", "-q")
    methods = json.loads(outcome.stdout)["methods"]
    assert methods["squeezed"]["lists"] == []
    csattention = methods["csattention"]
    assert csattention["layers"] == csattention["blocks"] == csattention["biggest"] == []
    assert [one["layer"] for one in csattention["lists"]] == lists.manifest.indexed_layers
    for one in csattention["lists"]:
        tensors, (keys, _) = lists.method_tensors("csattention", one["layer"]), lists.context(one["layer"])
        tail = lists.queries(one["layer"])["tail"].unflatten(0, (len(keys), -1))
        expected = _shares_from_logits(tail[:, :, lists.manifest.split.tail // 2 :], _middle(lists, keys), tensors)
        assert one["subspace_shares"] == pytest.approx(expected.mean(0).tolist(), rel=1e-6)
        assert one["ranked_shares"] == pytest.approx(expected.sort(-1, descending=True)[0].mean(0).tolist(), rel=1e-6)
        heads, subspaces, centroids, entries = tensors["table_tokens"].shape
        assert (one["lists"], one["entries"]) == (heads * subspaces * centroids, entries)
        assert 0 < one["in_lists"] <= one["keys_listed"] <= 1


def _middle(artifact: Artifact, rows: torch.Tensor) -> torch.Tensor:
    split = artifact.manifest.split
    return rows[:, split.sinks : split.sinks + split.middle]


def _shares_from_logits(queries: torch.Tensor, keys: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return each subspace's share of the logits' deviations, one row a query [Hk, G, R, D] over keys [Hk, M, D]."""
    parts = [part.long() for part in tensors["channels"]]
    logits = [torch.einsum("hgrd,hmd->hgrm", queries[..., of].double(), keys[..., of].double()) for of in parts]
    deviations = torch.stack([one.std(-1, correction=0).flatten() for one in logits], -1)
    return deviations / deviations.sum(-1, keepdim=True)


def test_a_summary_fits_a_screen_and_says_how_to_see_the_rest(lists: Artifact) -> None:
    summary = run_here("inspect", "-q").stdout
    assert len(summary.splitlines()) <= 24
    assert all(f"{name}: " in summary for name in lists.manifest.methods)
    assert "biggest clusters" not in summary
    shown = "inspect --index doc.skv --method all"
    assert summary.endswith(f"\nBlocks, clusters and lists: `sparsekv {shown}`\n")
    whole = run_here(*shown.split(), "-q", "--model", "model").stdout
    assert summary[: summary.index("Blocks, clusters")].splitlines()[:8] == whole.splitlines()[:8]
    assert "biggest clusters" in whole
    for more in (("--by", "layer"), ("--clusters", "0"), ("--layer", "1")):
        assert "clusters a KV head" in run_here("inspect", "-q", "--model", "model", *more).stdout


def test_one_method_is_described_and_drawn_when_it_is_named(lists: Artifact) -> None:
    shown = run_here("inspect", "--method", "csattention", "--plot", "shares.png", "--by", "layer", "-q")
    assert shown.code == 0, shown.stderr
    assert "keys listed" in " ".join(shown.stdout.split())
    assert "tokens in a cluster" not in shown.stdout
    assert sum(line.startswith("│") for line in shown.stdout.splitlines()) == len(lists.manifest.indexed_layers)
    both = run_here("inspect", "--method", "all", "--plot", "sizes.png", "--json", "-q")
    assert list(json.loads(both.stdout)["methods"]) == list(lists.manifest.methods)
    shares, sizes = Path("shares.png").read_bytes(), Path("sizes.png").read_bytes()
    assert shares.startswith(PNG)
    assert sizes.startswith(PNG)
    clustered = next(name for name in lists.manifest.methods if name != "csattention")
    assert run_here("inspect", "--method", clustered, "--plot", "named.png", "-q").code == 0
    assert Path("named.png").read_bytes() == sizes != shares


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nonsense", "no method 'nonsense'"),
        ("multipole-windowed", "not built with"),
        ("quest", "has no tensors of this method"),
    ],
)
def test_a_method_that_the_index_does_not_have_is_refused(place: Path, name: str, why: str) -> None:
    outcome = run_here("inspect", "--method", name, "-q")
    assert outcome.code == 2
    assert name in outcome.error()
    assert why in outcome.error()


def test_json_has_each_levels_spreads_and_the_blocks(blocks: Artifact) -> None:
    outcome = run_here("inspect", "-i", "blocks.skv", "--json", "-q")
    multipole = json.loads(outcome.stdout)["methods"]["multipole"]
    split = blocks.manifest.split
    cuts = [split.sinks + cut for cut in block_offsets(split.middle, BLOCK)]
    assert len(cuts) > 3
    assert [(one["start"], one["stop"]) for one in multipole["blocks"]] == list(pairwise(cuts))
    assert sum(one["tokens"] for one in multipole["blocks"]) == split.middle
    assert [one["open"] for one in multipole["blocks"]] == [False] * (len(cuts) - 2) + [True]
    assert [(one["layer"], one["level"]) for one in multipole["layers"]] == [(n // 2, n % 2) for n in range(6)]
    for one in multipole["layers"]:
        tensors = blocks.method_tensors("multipole", one["layer"])
        labels = token_labels(tensors, one["level"], split.sinks)
        for name, rows in zip(("key_spread", "value_spread"), blocks.context(one["layer"]), strict=True):
            middle = rows[:, split.sinks : split.sinks + split.middle]
            assert one[name] == pytest.approx(spread_by_definition(middle, labels), rel=1e-3)
    heads = blocks.method_tensors("multipole", 0)["level0.counts"].shape
    assert sum(one["clusters"] for one in multipole["blocks"]) == heads[1]


def test_the_table_shows_blocks_and_spreads_and_shortens_many_blocks(blocks: Artifact) -> None:
    shown = run_here("inspect", "-i", "blocks.skv", "--clusters", "0", "-q")
    assert shown.code == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert sum("open" in line.split() for line in lines) == 1
    assert any("key spread" in line and "value spread" in line for line in lines)
    build = ("build-index", "doc.txt", "--model", "model", "--method", "multipole", "--block", "16", "-q")
    assert run_here(*build, "-o", "many.skv").code == 0
    many = run_here("inspect", "-i", "many.skv", "--clusters", "0", "-q").stdout.splitlines()
    assert sum("..." in line for line in many) == 1
    assert len(many) < len(lines) + 10


def test_a_summary_is_of_all_layers_and_their_rows_come_on_request(blocks: Artifact) -> None:
    inspect = ("inspect", "-i", "blocks.skv", "--clusters", "0", "-q")
    rows = json.loads(run_here(*inspect, "--json").stdout)["methods"]["multipole"]["layers"]
    summary, by_layer = run_here(*inspect).stdout, run_here(*inspect, "--by", "layer").stdout
    for level in (0, 1):
        some = [row for row in rows if row["level"] == level]
        clusters = sum(row["clusters"] for row in some)
        spreads = [row["key_spread"] for row in some]
        (line,) = (line for line in summary.splitlines() if line.startswith(f"│     {level} │ {clusters:>8,} │"))
        assert f"{sum(spreads) / len(spreads):.3f} ({min(spreads):.3f} to {max(spreads):.3f})" in line
        assert f"│ {max(row['max'] for row in some):,.0f} │".replace(" ", "") in line.replace(" ", "")
    assert "│ layer │ level │" not in summary.replace("┃", "│")
    assert sum(f"{row['key_spread']:.3f}" in by_layer for row in rows) == len(rows)
    assert run_here(*inspect, "--by", "head").code == 2


def test_an_index_without_value_centroids_shows_none(place: Path) -> None:
    """Its tensors are those that an earlier version wrote: levels of keys alone."""
    path = place / "doc.skv"
    before = json.loads(run_here("inspect", "-i", "doc.skv", "--json", "-q").stdout)["methods"]["squeezed"]
    _without_value_centroids(path)
    after = json.loads(run_here("inspect", "-i", "doc.skv", "--json", "-q").stdout)["methods"]["squeezed"]
    assert after["layers"] == [{**one, "value_spread": None} for one in before["layers"]]
    assert before["blocks"] == after["blocks"] == []
    assert "none" in run_here("inspect", "-i", "doc.skv", "-q", "--method", "all").stdout


def _without_value_centroids(folder: Path) -> None:
    for name in [name for name in Artifact(folder).manifest.files if name.startswith("squeezed/")]:
        change_tensors(
            folder, name, lambda tensors: {key: rows for key, rows in tensors.items() if "value_centroids" not in key}
        )


def test_the_default_budget_is_told_in_the_words_of_stats(place: Path) -> None:
    told = run_here("generate", "Why?", "--max-new-tokens", "1", "--stats", "--budget", "10%").stderr
    budget = told.partition("budget ")[2].partition(")")[0] + ")"
    shown = run_here("inspect", "--index", "doc.skv").stdout
    assert shown.count(f"default budget: {budget}\n") == 2
    methods = json.loads(run_here("inspect", "--index", "doc.skv", "--json").stdout)["methods"]
    assert {name: one["default_budget"] for name, one in methods.items()} == {"multipole": 0.1, "squeezed": 0.1}

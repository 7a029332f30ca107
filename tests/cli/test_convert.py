"""`convert` and `--kv-dtype` as a person uses them: the files of a direct build, what it costs, what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.command import fails, run_here
from support.sealing import change_bytes, read_fields, reseal

from sparsekv.formats.checksums import hash_bytes
from sparsekv.formats.index.schema import MANIFEST, layer_file

METHODS = ("--method", "multipole", "--method", "squeezed", "--method", "csattention", "--method", "codes")
BUILD = ("build-index", "doc.txt", "--model", "model", *METHODS, "--max-tokens", "600", "-q")


def _content(index: Path) -> dict[str, str]:
    """Hashes of all files but the manifest, and the manifest's fields but those that say when it was made."""
    files = {path for path in index.rglob("*") if path.is_file() and path.name not in (MANIFEST, ".lock")}
    fields = read_fields(index)
    of_its_own = ("uuid", "parent_uuid", "created", "manifest_sha256")
    told = {name: json.dumps(value) for name, value in fields.items() if name not in of_its_own}
    return {str(path.relative_to(index)): hash_bytes(path.read_bytes()) for path in files} | told


@pytest.fixture(scope="module")
def both(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both indices of `indices`, to be copied, never changed."""
    folder = tmp_path_factory.mktemp("both")
    shutil.copy(built / "doc.txt", folder)
    (folder / "model").symlink_to(built / "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run_here(*BUILD, "-o", "exact.skv").code == 0
        assert run_here(*BUILD, "-o", "direct.skv", "--kv-dtype", "int8").code == 0
    return folder


@pytest.fixture
def indices(both: Path, place: Path) -> Path:
    """`place` with an index in exact.skv and one in 8 bits, built directly, in direct.skv."""
    for name in ("exact.skv", "direct.skv"):
        shutil.copytree(both / name, place / name)
    return place


BY_A_MODEL = ("probe", "canary", "kv_storage")
"""Fields of the manifest that a build computes over int8 rows and that a conversion, without a model, copies."""


def _without_probe(content: dict[str, str]) -> dict[str, Any]:
    return {name: value for name, value in json.loads(content["kv_storage"]).items() if name != "exact_probe"}


def test_a_converted_index_is_the_one_that_a_build_gives(indices: Path) -> None:
    before = _content(Path("exact.skv"))
    outcome = run_here("convert", "exact.skv", "--kv-dtype", "int8", "-o", "new.skv")
    assert (outcome.code, outcome.stdout) == (0, "new.skv\n"), outcome.stderr
    assert "Keys and values are stored in int8: dense attention over them has an output error of 0.0" in outcome.stderr
    new, direct = (_content(Path(name)) for name in ("new.skv", "direct.skv"))
    assert new == {**direct, **{field: new[field] for field in BY_A_MODEL}}
    assert [new[field] for field in ("probe", "canary")] == [before[field] for field in ("probe", "canary")]
    assert [json.loads(one["kv_storage"]).pop("exact_probe") for one in (new, direct)] == [True, False]
    assert _without_probe(new) == _without_probe(direct)
    assert _content(Path("exact.skv")) == before
    assert read_fields(Path("new.skv"))["parent_uuid"] == read_fields(Path("exact.skv"))["uuid"]
    assert sorted(path.name for path in Path().glob("new.skv*")) == ["new.skv"]


def test_a_converted_index_is_updated_like_any_other(indices: Path) -> None:
    """Its recipes are those of a build, so the same build finds nothing to do."""
    assert run_here("convert", "exact.skv", "-o", "new.skv", "-q").code == 0
    before = _content(Path("new.skv"))
    assert run_here(*BUILD, "-o", "new.skv", "--kv-dtype", "int8").code == 0
    assert _content(Path("new.skv")) == before
    more = Path("more.txt")
    more.write_text(Path("doc.txt").read_text(encoding="utf-8")[:500], encoding="utf-8")
    assert run_here("append", more, "--index", "new.skv", "--model", "model", "--rebuild", "-q").code == 0
    assert run_here("inspect", "--index", "new.skv", "--verify", "--model", "model", "-q").code == 0
    report = run_here("recall-report", "--index", "new.skv", "--method", "oracle", "-q")
    assert "measured on an earlier text of " in report.stdout


def test_what_storing_costs_is_shown(indices: Path) -> None:
    storage = read_fields(Path("direct.skv"))["kv_storage"]
    mean = sum(storage["errors"]) / len(storage["errors"])
    report = ("recall-report", "--index", "direct.skv", "--method", "oracle", "--budget", "5%", "-q")
    assert f"an output error of {mean:.4f} against the exact ones" in run_here(*report).stdout
    found = json.loads(run_here(*report, "--json").stdout)["kv_storage"]
    assert found == {
        "dtype": "int8",
        "error": pytest.approx(mean),
        "layers": storage["errors"],
        "measured_tokens": storage["measured_tokens"],
    }
    shown = run_here("inspect", "--index", "direct.skv", "--model", "model", "-q").stdout
    assert f"in int8: output error of dense attention {mean:.4f}" in " ".join(shown.split())
    plain = run_here(*report[:2], "exact.skv", *report[3:])
    assert "are stored in" not in plain.stdout


def test_a_build_says_what_storing_costs(place: Path) -> None:
    outcome = run_here(*(option for option in BUILD if option != "-q"), "-o", "new.skv", "--kv-dtype", "int8")
    assert "Keys and values are stored in int8: dense attention over them has an output error of" in outcome.stderr


def test_a_tuned_default_is_not_kept_and_that_is_said(indices: Path) -> None:
    tuned = ("tune", "--index", "exact.skv", "--target-recall", "0.2", "--method", "quest", "-q")
    assert run_here(*tuned).code == 0
    outcome = run_here("convert", "exact.skv", "-o", "new.skv")
    assert "the default that tune found was for the earlier index and is not copied" in outcome.stderr
    assert read_fields(Path("new.skv"))["defaults"] is None


def test_answers_and_talks_over_8_bits_are_saved_and_asked_again(indices: Path) -> None:
    how = ("--index", "direct.skv", "--model", "model", "--method", "multipole", "--max-new-tokens", "4", "-q")
    assert run_here("generate", "Why?", *how, "--save-to", "talk.skv").code == 0
    saved = read_fields(Path("talk.skv"))
    assert saved["kv_storage"] == read_fields(Path("direct.skv"))["kv_storage"]
    assert run_here("generate", "And then?", "--index", "talk.skv", *how[2:]).code == 0
    assert run_here("trace", "Why?", *how, "--truth", "-o", "trace.json").code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("none.skv", "-o", "new.skv"), 2, ("no index at none.skv",)),
        (("doc.txt", "-o", "new.skv"), 2, ("INDEX doc.txt is a text",)),
        (("exact.skv", "-o", "direct.skv"), 2, ("direct.skv exists already", "--output")),
        (("exact.skv", "-o", "new.skv", "--kv-dtype", "auto"), 2, ("--kv-dtype auto", "give int8")),
        (
            ("exact.skv", "-o", "new.skv", "--kv-dtype", "fp8"),
            2,
            ("--kv-dtype fp8", "that an index can be converted to; give int8"),
        ),
        (("direct.skv", "-o", "new.skv"), 2, ("direct.skv stores its keys and values in int8 already", "document")),
        (("direct.skv", "-o", "new.skv", "--kv-dtype", "auto"), 2, ("in int8 already", "document")),
        (("exact.skv",), 2, ("--output",)),
        (("exact.skv", "-o", "doc.txt/new.skv"), 1, ("doc.txt/new.skv",)),
        (("exact.skv", "-o", "new.skv", "--device", "tpu"), 2, ("--device tpu",)),
    ],
)
def test_what_cannot_be_converted_is_told_in_a_line(
    indices: Path, arguments: tuple[str, ...], code: int, says: tuple[str, ...]
) -> None:
    there = sorted(path.name for path in indices.iterdir())
    fails(code, "convert", *arguments, says=says)
    assert sorted(path.name for path in indices.iterdir()) == there


def test_damage_never_gets_a_sum_of_its_own(indices: Path) -> None:
    def flip(data: bytearray) -> bytearray:
        data[-1] ^= 1
        return data

    change_bytes(Path("exact.skv"), layer_file("context", 1), flip, sealed=False)
    fails(1, "convert", "exact.skv", "-o", "new.skv", says=("context/layer_001", "sha256"))
    assert not list(Path().glob("new.skv*"))


def test_a_method_of_another_version_is_told_before_any_work(indices: Path) -> None:
    reseal(Path("exact.skv"), lambda fields: fields["methods"]["multipole"].update(revision=99))
    fails(1, "convert", "exact.skv", "-o", "new.skv", says=("multipole was built by another version", "--force"))
    assert not list(Path().glob("new.skv*"))

"""Links that a stranger left under names that a writer may use: nothing is ever written through one."""

import pytest
from support.sandbox import INDEX, VICTIMS, Sandbox

TUNE = ("tune", "-i", INDEX, "--target-recall", "0.3", "--method", "quest")
WRITERS = {
    "append": lambda sandbox: sandbox.append(),
    "build": lambda sandbox: sandbox.build("--force"),
    "tune": lambda sandbox: sandbox.run(*TUNE),
}


@pytest.mark.thinned
@pytest.mark.parametrize("name", ["manifest.json.tmp", "unfinished.json.tmp", "unfinished.json", ".lock"])
@pytest.mark.parametrize("writer", WRITERS)
def test_nothing_is_written_through_a_link(sandbox: Sandbox, writer: str, name: str) -> None:
    (sandbox.index / name).unlink(missing_ok=True)
    (sandbox.index / name).symlink_to("../.bashrc")
    WRITERS[writer](sandbox).assert_harmless()
    assert (sandbox.home / "mail/.bashrc").read_bytes() == VICTIMS["mail/.bashrc"]


@pytest.mark.parametrize("folder", ["context", "multipole"])
def test_nothing_is_written_or_removed_in_a_linked_folder(sandbox: Sandbox, folder: str) -> None:
    theirs = (sandbox.index / folder).rename(sandbox.home / "theirs")
    (theirs / "mine.safetensors").write_bytes(b"mine")
    (sandbox.index / folder).symlink_to(theirs)
    before = sorted(path.name for path in theirs.iterdir())
    sandbox.append().assert_harmless()
    assert sorted(path.name for path in theirs.iterdir()) == before

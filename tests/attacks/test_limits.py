"""Less memory than a command needs: one line, whatever library notices first."""

import pytest
from support.sandbox import CACHE, INDEX, Sandbox, changes, hash_tree

from sparsekv.cli.common.process import LEAST_LEFT

MEGABYTE = 1 << 20
LEAST = LEAST_LEFT // MEGABYTE
SOME = (("ask", 24), ("append", LEAST + 1), ("build", LEAST + 16), ("report", LEAST - 1))
SIZES = (0, 8, 64, 128, 256, 448, 512, 640, *(LEAST + more for more in (-16, -1, 0, 1, 2, 4, 8, 16, 32, 64, 320)))
ALL = [(name, size) for name in ("ask", "append", "build", "report") for size in SIZES]


def _run(sandbox: Sandbox, name: str, megabytes: int) -> None:
    before, limits = hash_tree(sandbox.home), {"AS": megabytes * MEGABYTE}
    if name == "report":
        run = sandbox.run("recall-report", "-i", INDEX, limits=limits)
    else:
        run = getattr(sandbox, name)(*(["-o", "new.skv"] if name == "build" else []), limits=limits)
    run.assert_harmless()
    assert not changes(before, hash_tree(sandbox.home), INDEX, "new.skv"), run


@pytest.mark.parametrize(("name", "megabytes"), SOME)
def test_little_address_space_is_told(sandbox: Sandbox, name: str, megabytes: int) -> None:
    _run(sandbox, name, megabytes)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "megabytes"), ALL)
def test_any_address_space_is_enough_or_told(sandbox: Sandbox, name: str, megabytes: int) -> None:
    _run(sandbox, name, megabytes)


@pytest.mark.parametrize("name", ["append", "build"])
def test_a_file_that_may_not_grow_is_told(sandbox: Sandbox, name: str) -> None:
    """As on a full disk: the index stays what it was."""
    before = hash_tree(sandbox.home)
    run = getattr(sandbox, name)(*(["--force"] if name == "build" else []), limits={"FSIZE": 20_000})
    run.assert_harmless()
    assert run.code == 1, run
    kept = [path for path in changes(before, hash_tree(sandbox.home), CACHE) if path in before]
    assert not kept, kept

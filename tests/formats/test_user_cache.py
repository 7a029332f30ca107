"""The cache folder of a user without a home, as an unknown uid in a container is."""

import os
import pwd
import stat
import tempfile
from pathlib import Path

import pytest
from support.command import run_here

from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.user.cache import cache_root, give_home


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user whom the system does not know, without HOME; returns the folder for temporary files."""

    def unknown(number: int) -> None:
        raise KeyError(number)

    for name in ("HOME", "SPARSEKV_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_an_unknown_user_has_a_folder_of_its_own_the_same_each_time(
    homeless: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = cache_root()
    assert root.is_relative_to(homeless / f"sparsekv-{os.getuid()}")
    assert stat.S_IMODE((homeless / f"sparsekv-{os.getuid()}").stat().st_mode) == 0o700
    assert Path.home() == homeless / f"sparsekv-{os.getuid()}"
    monkeypatch.delenv("HOME")
    assert cache_root() == root
    assert not (homeless / "~").exists()


@pytest.mark.parametrize("before", ["a link", "open to others", "a file"])
def test_a_folder_that_another_user_could_have_made_is_not_taken(homeless: Path, before: str) -> None:
    place = homeless / f"sparsekv-{os.getuid()}"
    if before == "a link":
        (homeless / "elsewhere").mkdir(mode=0o700)
        place.symlink_to(homeless / "elsewhere")
    elif before == "a file":
        place.touch()
    else:
        place.mkdir()
        place.chmod(0o777)
    give_home()
    assert Path.home() != place
    assert Path.home().parent == homeless


def test_where_no_folder_can_be_made_one_line_says_so(homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(homeless / "none"))
    with pytest.raises(SparsekvError, match=r"no home folder, and none can be made: .*; set HOME$"):
        give_home()


def test_every_command_gives_an_unknown_user_a_home(homeless: Path) -> None:
    assert "no.skv" in run_here("inspect", "-i", "no.skv").error()
    assert Path.home() == homeless / f"sparsekv-{os.getuid()}"


def test_a_home_that_is_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    give_home()
    assert os.environ["HOME"] == "/somewhere"

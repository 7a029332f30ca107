"""How many threads a step takes follows what other processes leave free, and what the user has said."""

import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.tiny_models import FAMILIES
from transformers import PreTrainedModel

from sparsekv.runtime.decoding import threads as module
from sparsekv.runtime.decoding.compiled import compile_layers
from sparsekv.runtime.decoding.threads import (
    CHOSEN_BY_USER,
    Usage,
    busy_seconds,
    free_cores,
    left_free,
    quota,
    threads_for,
    usage,
)

STAT = """cpu  600 0 300 9000 50 10 20 70 5 0
cpu0 100 10 200 4000 20 5 15 30 5 0
cpu1 200 0 50 3000 30 5 5 40 0 0
cpu10 300 0 50 2000 0 0 0 0 0 0
intr 337617 0
ctxt 1
"""


def ticks(count: int) -> float:
    return count / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(("cores", "busy"), [({0}, 360), ({1}, 300), ({0, 1}, 660), ({10}, 350), (set(), 0)], ids=str)
def test_idle_and_waiting_cores_are_free_and_stolen_ones_busy(cores: set[int], busy: int) -> None:
    assert busy_seconds(STAT, cores) == pytest.approx(ticks(busy))


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000\n", math.inf), ("150000 100000\n", 1.5), ("50000 100000", 0.5)]
)
def test_a_control_groups_limit_is_cores(text: str, cores: float) -> None:
    assert quota(text) == cores


@pytest.mark.parametrize(
    ("busy", "own", "free"),
    [(4.0, 4.0, 2.0), (4.0, 1.0, 0.5), (3.0, 2.0, 1.5), (1.0, 1.5, 2.0), (0.0, 0.0, 2.0)],
    ids=["all ours", "others have most", "others have half a core", "counted late", "idle"],
)
def test_what_others_have_is_not_free(busy: float, own: float, free: float) -> None:
    """Over two seconds, of two cores."""
    assert left_free(Usage(5.0, 3.0, 1.0), Usage(7.0, 3.0 + busy, 1.0 + own), 2) == pytest.approx(free)


@pytest.mark.parametrize(
    ("free", "most", "threads"),
    [
        (2.0, 2, 2),
        (1.6, 2, 2),
        (1.5, 2, 1),
        (0.3, 2, 1),
        (-1.0, 2, 1),
        (15.8, 16, 16),
        (9.7, 16, 10),
        (math.inf, 8, 8),
        (3.0, 1, 1),
    ],
)
def test_threads_are_the_cores_that_are_free(free: float, most: int, threads: int) -> None:
    assert threads_for(free, most) == threads


@pytest.fixture
def model() -> PreTrainedModel:
    return FAMILIES["llama"]()


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch has two, and nobody has said how many."""
    for name in CHOSEN_BY_USER:
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@dataclass
class Load:
    """How many of two cores others have."""

    others: float = 0.0


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, two_threads: None) -> Load:
    found = Load()
    monkeypatch.setattr(module, "INTERVAL", 0.0)
    monkeypatch.setattr(module, "left_free", lambda before, now, cores: 2 - found.others)
    monkeypatch.setattr(module, "_meter", module._Meter())
    return found


def test_steps_have_a_thread_for_each_free_core_and_the_caller_all_of_them(load: Load, model: PreTrainedModel) -> None:
    with free_cores(model) as cores:
        seen = []
        for others in (0.0, 1.7, 0.1):
            load.others = others
            cores.follow()
            seen.append(torch.get_num_threads())
        load.others = 1.0
        cores.follow()
    assert [*seen, torch.get_num_threads()] == [2, 1, 2, 2]


def test_what_another_thread_has_lowered_is_not_taken_for_torchs_own(load: Load, model: PreTrainedModel) -> None:
    load.others = 2.0
    with free_cores(model), free_cores(model) as within:
        assert torch.get_num_threads() == 1
        assert within.most == 2
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("name", CHOSEN_BY_USER)
def test_a_number_that_the_user_has_fixed_stays(
    load: Load, model: PreTrainedModel, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "2")
    load.others = 2.0
    with free_cores(model):
        assert torch.get_num_threads() == 2


def test_compiled_steps_and_a_gpus_keep_their_number(load: Load, model: PreTrainedModel) -> None:
    load.others = 2.0
    with free_cores(FAMILIES["llama"]().to("meta")):
        assert torch.get_num_threads() == 2
    compile_layers(model, backend="eager").remove()
    with free_cores(model):
        assert torch.get_num_threads() == 2


def test_a_kernel_that_does_not_tell_changes_nothing(
    load: Load, model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COUNTERS", tmp_path / "none")
    monkeypatch.setattr(module, "_meter", module._Meter())
    assert usage() is None
    load.others = 2.0
    with free_cores(model) as cores:
        cores.follow()
        assert torch.get_num_threads() == 2


def test_the_kernels_counters_grow_with_what_this_process_does() -> None:
    before = usage()
    assert before is not None
    while (now := usage()) is not None and now.own - before.own < 0.05:
        pass
    assert now is not None
    assert now.busy - before.busy >= 0.05 - ticks(2) * len(os.sched_getaffinity(0))


def waiting(code: str, **environment: str) -> dict[str, str]:
    """Return the settings that GNU OpenMP prints as torch loads it, in a process that runs `code`."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    shown = plain | environment | {"OMP_DISPLAY_ENV": "VERBOSE"}
    done = subprocess.run([sys.executable, "-c", code], env=shown, check=True, capture_output=True, text=True)
    lines = (line.split("=", 1) for line in done.stderr.splitlines() if " = " in line)
    return {name.split()[-1]: value.strip(" '") for name, value in lines}


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import sparsekv.runtime.decoding.engine", marks=pytest.mark.slow),
        pytest.param("import sparsekv.indexing.build", marks=pytest.mark.slow),
        "import sparsekv.cli.main, sparsekv.cli.generate",
    ],
)
def test_threads_that_wait_do_not_spin_for_long(code: str) -> None:
    from sparsekv.formats import SPINS

    # Before transformers, which takes seconds to import, torch has been loaded.
    ends = "import os, sys; sys.addaudithook(lambda event, about: about[:1] == ('transformers',) and os._exit(0))"
    assert waiting(f"{ends}; {code}")["GOMP_SPINCOUNT"] == str(SPINS)


@pytest.mark.parametrize(
    ("own", "spins"), [({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "active"}, "30000000000")]
)
def test_what_the_user_says_of_waiting_holds(own: dict[str, str], spins: str) -> None:
    """As the library of torch reads it, which is loaded alone: torch takes seconds."""
    (torch_folder,) = importlib.util.find_spec("torch").submodule_search_locations
    places = Path(torch_folder, "lib"), Path(torch_folder).with_name("torch.libs")
    library = next(file for place in places for file in place.glob("libgomp*.so*"))
    loads = f"import ctypes, sparsekv.formats; ctypes.CDLL({str(library)!r})"
    assert waiting(loads, **own)["GOMP_SPINCOUNT"] == spins

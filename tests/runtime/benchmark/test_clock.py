"""How often a step runs to be timed, and what is told of its times."""

import pytest
import torch

from sparsekv.runtime.benchmark.clock import WARM_UPS, Timing, WallClock, clock_for

CPU = torch.device("cpu")


def test_median_and_quartiles() -> None:
    timing = Timing.of([5.0, 1.0, 4.0, 2.0, 3.0], "graph", torch.zeros(1))
    assert (timing.lower, timing.median, timing.upper) == (2.0, 3.0, 4.0)


@pytest.mark.parametrize("cycle", [1, 3])
@pytest.mark.parametrize("cold", [False, True])
def test_whole_cycles_run_and_the_last_output_is_kept(cycle: int, cold: bool) -> None:
    done: list[torch.Tensor] = []

    def step() -> torch.Tensor:
        done.append(torch.tensor(len(done)))
        return done[-1]

    timing = WallClock(CPU, 4, cold=cold).time(step, cycle)
    assert len(done) == (WARM_UPS + 4 + 1) * cycle
    assert timing.output is done[-1]
    assert 0 < timing.lower <= timing.median <= timing.upper


def test_a_copy_has_a_bandwidth() -> None:
    clock = clock_for(CPU, 2, cold=False)
    assert isinstance(clock, WallClock)
    assert 1e8 < clock.bandwidth() < 1e13

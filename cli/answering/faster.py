"""`--method auto`: answer by dense attention or by the index's default method, whichever is faster here."""

from contextlib import AbstractContextManager, nullcontext

import torch

from sparsekv.cli.common.console import note, waiting
from sparsekv.formats.device import choose_device
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.models.load import DTYPES, check_dtype
from sparsekv.formats.models.rope import rope_depends_on_length
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.benchmark.faster_attention import Choice, choose_faster, choose_for_numbers

TIMING = "timing a step, for --method auto"


def take_faster(
    artifact: Artifact, config: DecodeConfig, questions: int, device: str, dtype: str, *, quiet: bool
) -> Choice:
    """Choose the faster of dense attention and a config's method, and print a note with the measured times.

    Args:
        questions: number of questions to answer at once. For a model whose questions cannot share a step, 1 is used.
        device, dtype: values of `--device` and `--dtype`.

    Raises:
        UsageError: the device or the dtype does not exist.
        SparsekvError: an error of `choose_faster`.
    """
    with waiting(TIMING, quiet=quiet):
        choice = choose_faster(artifact, config, _together(artifact, questions), *_runs_on(artifact, device, dtype))
    note(choice.told, quiet=quiet)
    return choice


def take_faster_for_numbers(
    artifact: Artifact,
    config: DecodeConfig,
    slots: int,
    device: str,
    dtype: str,
    *,
    alone: AbstractContextManager[object] | None = None,
    quiet: bool,
) -> DecodeConfig:
    """Return the config with `dense_from` set: a decode step shared by at least this many answers attends densely.

    The config is unchanged if the method is always faster, and is that of dense attention if the method never is.
    Prints a note with each choice and the measured times.

    Args:
        slots: largest number of answers that share a decode step.
        device, dtype: values of `--device` and `--dtype`.
        alone: a context in which nothing else uses the device; None: nothing else uses it anyway.

    Raises:
        UsageError, SparsekvError: as in `take_faster`.
    """
    with waiting(TIMING, quiet=quiet), alone or nullcontext():
        config, choices = choose_for_numbers(
            artifact, config, _together(artifact, slots), *_runs_on(artifact, device, dtype)
        )
    for choice in reversed(choices):
        note(f"{artifact.folder.name}: {choice.told}", quiet=quiet)
    return config


def _together(artifact: Artifact, questions: int) -> int:
    """Return the number of questions that can share a step."""
    return 1 if rope_depends_on_length(artifact.manifest.rope.parameters) else questions


def _runs_on(artifact: Artifact, device: str, dtype: str) -> tuple[torch.device, torch.dtype]:
    """Return the device and the model's dtype that the values of `--device` and `--dtype` stand for."""
    check_dtype(dtype)
    return choose_device(device), DTYPES[artifact.manifest.dtype if dtype == "auto" else dtype]

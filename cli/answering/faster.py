"""`--method auto`: answer by dense attention or by the index's default method, whichever is faster here."""

from sparsekv.cli.common.console import note, waiting
from sparsekv.formats.device import choose_device
from sparsekv.formats.index.reader import Artifact
from sparsekv.formats.models.load import DTYPES, check_dtype
from sparsekv.formats.models.rope import rope_depends_on_length
from sparsekv.runtime.attention.config import DecodeConfig
from sparsekv.runtime.benchmark.faster_attention import Choice, choose_faster


def take_faster(
    artifact: Artifact, config: DecodeConfig, questions: int, device: str, dtype: str, *, quiet: bool
) -> Choice:
    """Choose the faster of dense attention and the method of a config, and note the choice with the measured times.

    Args:
        questions: number of questions to answer at once. For a model whose questions cannot share a step, 1 is used.
        device, dtype: values of `--device` and `--dtype`.

    Raises:
        UsageError: the device or the dtype does not exist.
        SparsekvError: an error of `choose_faster`.
    """
    check_dtype(dtype)
    if rope_depends_on_length(artifact.manifest.rope.parameters):
        questions = 1
    where, of_model = choose_device(device), DTYPES[artifact.manifest.dtype if dtype == "auto" else dtype]
    with waiting("timing a step, for --method auto", quiet=quiet):
        choice = choose_faster(artifact, config, questions, where, of_model)
    note(choice.told, quiet=quiet)
    return choice

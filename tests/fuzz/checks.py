"""Runs a case: builds its index, compares answers with oracles, and then does its deed (an operation with a check)."""

import shutil
import tempfile
import traceback
from pathlib import Path

import torch

from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.index.manifest import PROBE_TOLERANCE

from .case import Case
from .deeds import DEEDS
from .oracles import Wrong
from .questions import Checks
from .refusals import is_due
from .rounding import Rounding
from .world import World

ROOM = next((path for path in (Path("/dev/shm"), Path(tempfile.gettempdir())) if path.is_dir()), None)


def check(case: Case, device: str = "cpu") -> str:
    """Run a case.

    Returns:
        the message of a refusal that is expected for the case; empty if the whole case ran.

    Raises:
        Wrong: a result does not agree with an oracle, or an unexpected refusal.
    """
    folder, threads = Path(tempfile.mkdtemp(prefix="sparsekv-fuzz-", dir=ROOM)), torch.get_num_threads()
    try:
        torch.set_num_threads(case.threads)
        world = World(case, folder, device)
        try:
            index = world.build("index.skv")
            deed = DEEDS.get(case.deed)
            Checks(world, index).run(all_of_them=deed is None or deed.asks)
            if deed is not None:
                deed.run(world, index)
        except SparsekvError as error:
            if not is_due(case, str(error)) and not _rounds_its_probe(world, str(error)):
                raise Wrong(f"refused: {str(error)[:30]}", str(error)) from error
            return str(error)
    finally:
        torch.set_num_threads(threads)
        shutil.rmtree(folder, ignore_errors=True)
    return ""


def _rounds_its_probe(world: World, message: str) -> bool:
    """Whether an index was refused for its probe although float32 rounding explains the difference of the logits."""
    if not message.startswith("the probe (logits of the last prompt token over the stored context) differs"):
        return False
    return Rounding(world, world.prompt().input_ids).logits(1) > PROBE_TOLERANCE[torch.float32]


def failure(case: Case, device: str = "cpu") -> dict[str, str]:
    """Return the kind of a case's failure, and its message; the kind is empty without a failure."""
    try:
        return {"kind": "", "told": check(case, device)}
    except Wrong as error:
        return {"kind": error.kind, "told": str(error)}
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in at if "sparsekv" in frame.filename.rpartition("site-packages")[2]] or at
        where = f"{Path(ours[-1].filename).name}:{ours[-1].name}"
        return {
            "kind": f"{type(error).__name__} in {where}",
            "told": f"{type(error).__name__} in {where}: {error}"[:500],
        }

"""What is checked of every case, before its deed."""

import shutil
import tempfile
from pathlib import Path

from sparsekv.formats.errors import SparsekvError

from .case import Case
from .deeds import DEEDS
from .oracles import Wrong
from .questions import Checks
from .refusals import is_due
from .world import World

ROOM = next((path for path in (Path("/dev/shm"), Path(tempfile.gettempdir())) if path.is_dir()), None)


def check(case: Case, device: str = "cpu") -> str:
    """Run a case.

    Returns:
        why the case was refused, where a refusal is due; empty where all of it ran.

    Raises:
        Wrong: something that must agree does not, or a refusal that is not due.
    """
    folder = Path(tempfile.mkdtemp(prefix="sparsekv-fuzz-", dir=ROOM))
    try:
        world = World(case, folder, device)
        try:
            index = world.build("index.skv")
            Checks(world, index).run()
            if case.deed:
                DEEDS[case.deed].run(world, index)
        except SparsekvError as error:
            if not is_due(case, str(error)):
                raise Wrong("refused", str(error)) from error
            return str(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return ""

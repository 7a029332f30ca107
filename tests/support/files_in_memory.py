"""Temporary files in memory: on ext4 a rename over a file waits until the new file's blocks are on the disk.

An index's journal is renamed over the last one after each file. Tests that build indices take 5 to 11% less time so.
No test relies on their other differences, which are O_DIRECT and sparse files.
"""

import os
import shutil
import tempfile
from pathlib import Path

SHARED = Path("/dev/shm")
ROOM = 6 << 30
"""Free bytes that are required; the tests need about a third of them."""


def keep_files_in_memory() -> None:
    """Store temporary files of this process, and of processes that it starts, in memory if there is room.

    If the user has set TMPDIR, nothing changes.
    """
    if "TMPDIR" in os.environ or not os.access(SHARED, os.W_OK | os.X_OK):
        return
    free = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    if min(shutil.disk_usage(SHARED).free, int(free["MemAvailable"].split()[0]) << 10) >= ROOM:
        os.environ["TMPDIR"] = str(SHARED)
        tempfile.tempdir = None  # tempfile reads TMPDIR again

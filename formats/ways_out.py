"""Errors for a folder that cannot be written, with remedies: free disk space, write elsewhere, write less."""

from dataclasses import dataclass
from pathlib import Path

from sparsekv.formats.errors import ArtifactError


@dataclass(frozen=True)
class WaysOut:
    """Remedies to suggest besides freeing disk space; empty where a command has no such option."""

    elsewhere: str = "choose another folder with --output"
    less: str = "shorten the document with --max-tokens"

    def no_space(self, folder: Path, size: int, free: int) -> ArtifactError:
        """The error for a disk with fewer free bytes than `size`."""
        ways = ", or ".join(part for part in ("make room", self.elsewhere, self.less) if part)
        return ArtifactError(f"{folder} needs {size / 1e6:.0f} MB and its disk has {free / 1e6:.0f} MB free; {ways}")

    def cannot_write(self, folder: Path, error: OSError) -> ArtifactError:
        """The error for a folder to which the system refuses to write."""
        reason = (error.strerror or str(error)).lower()
        ways = ", or ".join(part for part in ("make room or permission there", self.elsewhere) if part)
        return ArtifactError(f"cannot write {folder}: {reason}; {ways}, and run the same command again")

"""Describe any exception in one line that names what failed and a remedy.

Imports nothing heavy: it must work when an import itself has failed.
"""

import errno
import shlex
import sys
from collections.abc import Iterator

from sparsekv.formats.errors import SparsekvError
from sparsekv.formats.ranks.place import own_place

LESS_MEMORY = {
    "build-index": "give fewer --max-tokens, a smaller --chunk-size or --dtype bfloat16",
    "append": "append less at a time, or give a smaller --chunk-size",
    "generate": "give --placement disk, or ask a shorter question",
    "chat": "give --placement disk, ask a shorter question, or /forget the talk so far",
    "recall-report": "give fewer --method or --budget at a time",
    "tune": "give fewer --method at a time",
    "trace": "leave out --truth, or ask a shorter question",
    "eval": "give a smaller --length or --chunk-size",
    "bench": "give a smaller --context or --batch",
}
"""How to need less memory, by command."""
REMEDIES = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "make room there",
    errno.EFBIG: "allow larger files there",
    errno.EACCES: "give yourself permission there",
    errno.EPERM: "give yourself permission there",
    errno.EROFS: "choose a folder that can be written",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.EMFILE: "allow more open files (ulimit -n)",
    errno.ENFILE: "close other programs",
    errno.EISDIR: "move the folder that lies there away",
    errno.ENOTDIR: "move the file that lies there away",
    errno.EIO: "check the disk",
}
"""What to do about an OSError, by its errno."""
_MEMORY = (
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    "unable to allocate",
    "bad_alloc",
    "failed to map segment",
    "out of memory",
)
_NO_THREAD = "can't start new thread"
_DEVICE = ("CUDA error", "CUDA out of memory", "cuBLAS", "CUBLAS_STATUS", "cuDNN", "CUDNN_STATUS", "CUDA driver")


def describe(error: BaseException, command: str) -> str:
    """One line that says what failed and what to do.

    Args:
        command: name of the command that failed; empty if none was called.
    """
    less = LESS_MEMORY.get(command, "close other programs")
    if isinstance(error, SparsekvError) and not _blames_another(error):
        return str(error)
    if any(_is_device(one) for one in causes(error)):
        return _device(error, less)
    if any(_is_memory(one) for one in causes(error)):
        return f"there is not enough memory on this machine; {less}, or raise the limit (ulimit -v) if there is one"
    if isinstance(error, RecursionError):
        return "something that was read is nested too deeply to be understood; check the files that you gave"
    if any(isinstance(one, RuntimeError) and _NO_THREAD in str(one) for one in causes(error)):
        return "the system starts no more threads; close other programs, or raise the limits (ulimit -u and ulimit -v)"
    if isinstance(error, OSError) and (error.errno is not None or error.filename is not None):
        return _system(error)
    text = " ".join(str(error).split())
    if isinstance(error, RuntimeError) and "home directory" in text:
        return "a path begins with ~ and a user who has no folder here; write the whole path"
    if isinstance(error, RuntimeError) and "faiss" in text:
        return f"faiss, which makes clusters, failed: {text}; try another --seed or fewer clusters, or report it"
    if isinstance(error, ImportError):
        return f"a part of the installation cannot be loaded: {text}; install sparsekv again"
    place = own_place()
    ranks = [] if place is None or place.folder is None else ["--gpus", str(place.size)]
    given = [argument for argument in sys.argv[1:] if argument != "--debug"]
    again = shlex.join(["sparsekv", *ranks, "--debug", *given])
    return f"internal error: {type(error).__name__}: {text}; run it again as `{again}` to see where, and report it"


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error and its chain of causes, including those suppressed by `from None`."""
    one: BaseException | None = error
    while one is not None:
        yield one
        one = one.__cause__ or one.__context__


def _blames_another(error: SparsekvError) -> bool:
    """Whether the message blames a file that could not be read, although memory or threads ran out."""
    below = list(causes(error))[1:]
    return "memory of" not in str(error) and any(_is_memory(one) or _NO_THREAD in str(one) for one in below)


def _is_memory(error: BaseException) -> bool:
    text = str(error).lower()
    named = isinstance(error, RuntimeError | OSError | ImportError | SystemError) and any(
        part in text for part in _MEMORY
    )
    return isinstance(error, MemoryError) or named or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def _is_device(error: BaseException) -> bool:
    torch = sys.modules.get("torch")
    named = (getattr(torch, name, None) for name in ("OutOfMemoryError", "AcceleratorError"))
    kinds = tuple(kind for kind in named if isinstance(kind, type))  # older versions have no AcceleratorError
    told = isinstance(error, RuntimeError) and any(part in str(error) for part in _DEVICE)
    return told or isinstance(error, kinds)


def _device(error: BaseException, less: str) -> str:
    text = str(next(one for one in causes(error) if _is_device(one)))
    if "out of memory" in text.lower() or "ALLOC_FAILED" in text:
        return f"there is not enough memory on the GPU; {less}, end what else runs there, or use --device cpu"
    first = " ".join(text.split("\n")[0].split())
    return f"the GPU failed: {first}; run it again, and with --device cpu if it fails again"


def _system(error: OSError) -> str:
    reason = (error.strerror or " ".join(str(error).split()) or type(error).__name__).lower()
    remedy = REMEDIES.get(error.errno or 0, "check it, and run the same command again")
    thing = " and ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    return f"{thing or 'the system'}: {reason}; {remedy}"

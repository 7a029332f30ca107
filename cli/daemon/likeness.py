"""Comparison of the server with the client, the process that the shell started for a command.

A fork of the server does not take over the compared facts, such as Python's options and resource limits, from the
client. A command runs in a fork only if all these facts are equal in both processes. Otherwise its result could differ.
"""

import os
import resource
import sys
from typing import Any

from sparsekv.cli.common.process import QUIET
from sparsekv.formats import bound_spinning

OF_A_SHELL = (
    "_",
    "PWD",
    "OLDPWD",
    "SHLVL",
    "TERM",
    "COLUMNS",
    "LINES",
    "COLORTERM",
    "STY",
    "WINDOW",
    "WINDOWID",
    "LC_TERMINAL",
    "LC_TERMINAL_VERSION",
    "MAKEFLAGS",
    "MAKELEVEL",
    "MFLAGS",
    "GPG_TTY",
    "INVOCATION_ID",
    "JOURNAL_STREAM",
    "SPARSEKV_INDEX",
    "SPARSEKV_MODEL",
    "SPARSEKV_DEVICE",
    "SPARSEKV_DTYPE",
    "SPARSEKV_CACHE",
    "SPARSEKV_SERVER",
)
OF_A_TERMINAL = (
    "TERM_",
    "SSH_",
    "TMUX",
    "VTE_",
    "KONSOLE_",
    "ITERM_",
    "VSCODE_",
    "XDG_SESSION",
    "KITTY_",
    "ALACRITTY_",
)
"""Environment variables that may differ between client and server, by name and by prefix. Commands read these variables
only after the fork. Libraries read hundreds of other variables when they are imported."""


def likeness() -> dict[str, Any]:
    """Return the facts of this process that must be equal in server and client, by name."""
    environment = QUIET | os.environ
    bound_spinning(environment)
    return {
        "Python": [sys.executable, sys.version, sys.prefix],
        "Python's options": [
            *(getattr(sys.flags, name) for name in dir(sys.flags) if name[0] != "_" and _is_flag(name)),
            sys.getfilesystemencoding(),
            sys.getfilesystemencodeerrors(),
            sorted(sys._xoptions),
            list(sys.warnoptions),
        ],
        "Python's path": sys.path[1:] if not sys.flags.safe_path else sys.path,
        "environment": {name: value for name, value in environment.items() if not _may_differ(name)},
        "limits (ulimit)": [list(resource.getrlimit(number)) for number in _limits()],
        "cores (taskset)": sorted(os.sched_getaffinity(0)),
        "priority (nice, chrt)": [
            os.getpriority(os.PRIO_PROCESS, 0),
            os.sched_getscheduler(0),
            os.sched_getparam(0).sched_priority,
        ],
        "groups": [os.getgid(), os.getegid(), *sorted(os.getgroups())],
        "capabilities": _capabilities(),
        "container": [*map(_namespace, ("mnt", "pid", "net", "user", "ipc")), os.stat("/").st_ino],
    }


def differing(mine: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """Return the name of the first fact that differs, with the differing keys if the fact is a dict; None if all are
    equal."""
    for name, value in mine.items():
        other = theirs.get(name)
        if value == other:
            continue
        if isinstance(value, dict) and isinstance(other, dict):
            names = sorted(one for one in {*value, *other} if value.get(one) != other.get(one))
            return f"{name} ({', '.join(names)})"
        return name
    return None


def _is_flag(name: str) -> bool:
    return name != "safe_path" and isinstance(getattr(sys.flags, name), int)


def _may_differ(name: str) -> bool:
    return name in OF_A_SHELL or name.startswith(OF_A_TERMINAL)


def _limits() -> list[int]:
    return sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})


def _namespace(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{name}")
    except OSError:
        return ""


def _capabilities() -> list[str]:
    try:
        with open("/proc/self/status") as file:
            return [line for line in file if line.startswith(("CapEff", "CapBnd", "NoNewPrivs", "Seccomp:"))]
    except OSError:
        return []

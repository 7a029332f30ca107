"""The command line's entry point: every failure becomes one line on stderr and an exit code.

Modules that take long to import are imported while `run` handles Ctrl-C, which would otherwise print a traceback. They
are not imported before `hand_over`, because a process whose command a server runs needs none of them.
"""

import atexit
import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

from sparsekv.cli.daemon.client import hand_over
from sparsekv.cli.daemon.messages import SERVE

if TYPE_CHECKING:
    from sparsekv.cli.completing.candidates import KnownCommand


def main() -> NoReturn:
    """Call `run` as the installed command, and then end the process at once. A server may run the command instead.

    A normal exit would first clear torch's and transformers' modules one by one, which takes a second.
    """
    code = 0
    _speak_utf8()
    if sys.argv[1:2] == [SERVE]:
        _serve()
    else:
        hand_over()
    from sparsekv.cli.common.process import rest_collector

    rest_collector()
    try:
        run()
    except SystemExit as ended:
        if isinstance(ended.code, str):
            raise
        code = ended.code or 0
    from sparsekv.cli.common.streams import flush_streams

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    atexit._run_exitfuncs()
    flush_streams()
    os._exit(code)


def _serve() -> None:
    """Become the server that `start` leaves in the background. Returns only in a fork, which then runs a command."""
    from sparsekv.cli.common.failures import fail
    from sparsekv.cli.common.process import rest_collector
    from sparsekv.cli.daemon.server import serve

    path, idle, *indices = sys.argv[2:]
    rest_collector()
    try:
        serve(path, float(idle), indices)
    except Exception as error:
        fail(error, "start", debug=False)


def _speak_utf8() -> None:
    """Restart in Python's UTF-8 mode if Python reads file names and arguments in another encoding than UTF-8.

    This is so in the C locale with PYTHONUTF8=0. Without the restart, non-ASCII letters in a question or a file name
    would look like damaged text.
    """
    if sys.getfilesystemencoding() != "utf-8" and sys.executable:
        os.environ["PYTHONUTF8"] = "1"  # also for processes that this process starts
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])


def run() -> None:
    """Run the command line on `sys.argv` and exit with 0 (done), 1 (failed), 2 (wrong usage) or 130 (interrupted).

    SIGPIPE ends the process when the reader of stdout closes the pipe; a shell reports that as 141.
    """
    # A closed pipe (`| head -1`) ends the writer silently, as with any other program.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    from sparsekv.cli.common.process import INTERRUPTED, interruptions
    from sparsekv.cli.completing.candidates import ASK

    if sys.argv[1:2] == [ASK]:
        _complete()
        sys.exit(0)
    debug = "--debug" in sys.argv
    error: BaseException | None = None
    code = 0
    with interruptions() as interruption:
        try:
            import sparsekv.cli.common.failures  # noqa: F401  # early: it cannot be imported once memory is full

            code = _call(debug=debug)
        except BaseException as caught:
            error = caught
    from sparsekv.cli.common.failures import end, fail
    from sparsekv.cli.common.streams import flush_streams

    error = error or flush_streams()
    if interruption.came and (error is not None or code):
        end(INTERRUPTED, interruption.told(_command()))
    if isinstance(error, SystemExit):
        raise error
    if error is not None:
        _fail_as_rank(error, debug=debug)
        fail(error, _command(), debug=debug)
    end(code)


def _complete() -> None:
    from sparsekv.cli.completing.candidates import answer

    def learned() -> "KnownCommand":
        import typer

        from sparsekv.cli.app import app
        from sparsekv.cli.completing.learn import learn

        group = typer.main.get_command(app)
        return learn(group, typer.Context(group, info_name="sparsekv"))

    answer(sys.argv[2:], learned)


def _fail_as_rank(error: BaseException, *, debug: bool) -> None:
    """End this process with the error if it is a rank of a distributed command; otherwise do nothing."""
    from sparsekv.formats.distributed.process import own_place

    place = own_place()
    if place is not None:
        from sparsekv.cli.distributed.launch import fail_as_rank

        fail_as_rank(place, error, _command(), debug=debug)


def _call(*, debug: bool) -> int:
    from sparsekv.cli.common.process import quiet_libraries
    from sparsekv.cli.common.streams import prepare_streams
    from sparsekv.formats.distributed.process import own_place
    from sparsekv.formats.user.cache import give_home

    prepare_streams()
    give_home()
    if (place := own_place()) is not None:
        from sparsekv.cli.distributed.launch import enter

        enter(place)
    with quiet_libraries(debug=debug):
        from sparsekv.cli.app import app

        code = app(standalone_mode=False, prog_name="sparsekv")
    return code if isinstance(code, int) else 0


def _command() -> str:
    from sparsekv.cli.common.commands import COMMANDS

    given = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    # Known names come first, because the value of `--gpus 2` is no command. A mistyped command is returned as it is.
    return next((one for one in given if one in COMMANDS), given[0] if given else "")

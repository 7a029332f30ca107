"""Shell completion: scripts for bash, zsh and fish, and candidates for the last word of a command line.

A cache has the commands and options. Without the cache, completion would import all commands and torch.
"""

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sparsekv.cli.common.streams import prepare_streams
from sparsekv.formats.user.cache import cache_root, named_models, read_small, replace_small

_FILE = "completion.json"
_PACKAGE = Path(__file__).parents[2]
_DECIDE = ("cli", "indexing", "runtime")
"""Folders of the package with commands and methods. Fields of methods are options, so both determine completions."""


@dataclass(frozen=True)
class KnownOption:
    """Description of an option for completion. `--no-x` is a separate option.

    Attributes:
        value: the kind of the option's value: none (a flag), names (one of `choices`), index, model, file, folder or
            any.
        owners: the methods that the option belongs to; empty for an option of the command itself.
    """

    names: list[str]
    help: str
    value: str
    choices: list[str] = field(default_factory=list)
    repeatable: bool = False
    owners: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class KnownCommand:
    """Description of a command for completion: options, arguments and subcommands. An argument is a KnownOption without
    names."""

    help: str
    options: list[KnownOption] = field(default_factory=list)
    arguments: list[KnownOption] = field(default_factory=list)
    commands: dict[str, "KnownCommand"] = field(default_factory=dict)

    @classmethod
    def of(cls, record: dict[str, Any]) -> "KnownCommand":
        """Make a command from a dictionary that `asdict` returned."""
        options, arguments = ([KnownOption(**one) for one in record[name]] for name in ("options", "arguments"))
        commands = {name: cls.of(one) for name, one in record["commands"].items()}
        return cls(record["help"], options, arguments, commands)


def remembered() -> KnownCommand | None:
    """Return the cached commands of the installed version; None if there is no valid cache for this version."""
    try:
        record = json.loads(read_small(cache_root() / _FILE) or "{}")
        return KnownCommand.of(record["program"]) if record["of"] == _installed() else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def remember(program: KnownCommand) -> None:
    """Write the commands to the cache for the next completion. If the cache cannot be written, nothing happens."""
    replace_small(cache_root() / _FILE, json.dumps({"of": _installed(), "program": asdict(program)}))


def _installed() -> list[Any]:
    """Return the paths and modification times of all files and folders whose change makes the cache invalid.

    These are the Python files in the folders of `_DECIDE`, and the folders of installed packages, because a package may
    add methods.
    """
    files = sorted(path for folder in _DECIDE for path in _files(_PACKAGE / folder))
    packages = [path for path in sys.path if path.endswith("-packages") and os.path.isdir(path)]
    return [[path, os.stat(path).st_mtime_ns] for path in (*files, *packages)]


def _files(folder: Path) -> Iterator[str]:
    for entry in os.scandir(folder):
        if entry.is_dir():
            yield from _files(Path(entry.path))
        elif entry.name.endswith(".py"):
            yield entry.path


_BLANK = " \t\n"
_PLAIN = re.compile(r"[\w./@%+,:=~-]")


@dataclass(frozen=True)
class BashLine:
    """The words of a bash command line without their quotes. The last word is incomplete.

    Attributes:
        quote: the quotation mark that is still open in the last word; empty if there is none.
        replaced: number of leading characters of the last word that stay. bash replaces only the text after the last
            opening quotation mark, or after the last unquoted `=` or `:` that is in `$COMP_WORDBREAKS`.
    """

    words: list[str]
    quote: str
    replaced: int

    def insertion(self, word: str) -> str | None:
        """Return the text by which bash must replace the end of the incomplete word, so that it becomes `word`.

        None if this text has a character that the open quote does not allow.
        """
        rest = word[self.replaced :]
        if self.quote:
            return None if self.quote in rest or (self.quote == '"' and re.search(r"[$`\\!]", rest)) else rest
        return "".join(letter if _PLAIN.match(letter) else f"\\{letter}" for letter in rest)


def read_bash_line(line: str, breaks: str) -> BashLine:
    """Split a bash command line, up to the cursor, into words.

    Args:
        breaks: the value of `$COMP_WORDBREAKS`.
    """
    words, quote, replaced, inside = [""], "", 0, False
    letters = iter(line)
    for letter in letters:
        if letter == "\\" and quote != "'":
            words[-1] += next(letters, "")
            inside = True
        elif quote:
            quote, words[-1] = ("", words[-1]) if letter == quote else (quote, words[-1] + letter)
        elif letter in "\"'":
            quote, replaced, inside = letter, len(words[-1]), True
        elif letter in _BLANK:
            if inside:
                words.append("")
            replaced, inside = 0, False
        else:
            words[-1] += letter
            replaced, inside = (len(words[-1]) if letter in "=:" and letter in breaks else replaced), True
    return BashLine(words, quote, replaced)


ASK = "__complete"
"""The first argument by which a shell's script asks for candidates. The shell's name follows. bash then passes the line
and `$COMP_WORDBREAKS`, the others pass the words up to the cursor.

The first line of the output is `words`, `open` (the shell adds no blank after the word), `file` or `folder`. Each
further line is a candidate. Except for bash, a tab and a description follow the candidate.
"""

BASH = """\
_sparsekv() {
    local kind="" word
    COMPREPLY=()
    while IFS= read -r word; do
        if [[ -z $kind ]]; then kind=$word; else COMPREPLY+=("$word"); fi
    done < <("$1" __complete bash "${COMP_LINE:0:COMP_POINT}" "$COMP_WORDBREAKS" 2>/dev/null)
    case $kind in
        open) compopt -o nospace ;;
        file) compopt -o default ;;
        folder) compopt -o plusdirs ;;
    esac
}
complete -F _sparsekv sparsekv
"""

ZSH = """\
#compdef sparsekv
_sparsekv() {
    local kind="" word about
    local -a found
    while IFS=$'\\t' read -r word about; do
        if [[ -z $kind ]]; then kind=$word; else found+=("${word//:/\\\\:}${about:+:$about}"); fi
    done < <("${words[1]}" __complete zsh "${(@Q)words[2,CURRENT-1]}" "${(Q)PREFIX}" 2>/dev/null)
    [[ $PREFIX == --*=* ]] && compset -P '*='
    case $kind in
        file) _files ;;
        folder) _files -/ ;;
    esac
    if (( $#found )); then
        if [[ $kind == open ]]; then _describe sparsekv found -S ''; else _describe sparsekv found; fi
    fi
}
if [[ $funcstack[1] == _sparsekv ]]; then _sparsekv "$@"; else compdef _sparsekv sparsekv; fi
"""

FISH = """\
function __sparsekv_complete
    set -l words (commandline -opc) (commandline -ct | string replace --regex '^["\\']' '' | string unescape)
    set -l answer (command $words[1] __complete fish $words[2..-1] 2>/dev/null)
    set -l option (string match --regex '^--[^=]+=' -- $words[-1])
    set -l begun (string replace --regex '^--[^=]+=' '' -- $words[-1])
    switch "$answer[1]"
        case file
            __fish_complete_path "$begun" | string replace --regex -- '^' "$option"
        case folder
            __fish_complete_directories "$begun" | string replace --regex -- '^' "$option"
    end
    if set -q answer[2]
        printf '%s\\n' $answer[2..-1]
    end
end
complete --command sparsekv --no-files --arguments '(__sparsekv_complete)'
"""

SCRIPTS = {"bash": BASH, "zsh": ZSH, "fish": FISH}


@dataclass
class Candidates:
    """Candidates for the incomplete word, each with a description.

    Attributes:
        files: `file` or `folder` if the word may also be a path, which the shell then completes itself; otherwise
            empty.
    """

    words: dict[str, str] = field(default_factory=dict)
    files: str = ""


def candidates(program: KnownCommand, words: list[str], incomplete: str) -> Candidates:
    """Return the candidates that may follow the complete words and begin with the incomplete word. `words` are without
    the program's name."""
    line = _Line(program)
    for word in words:
        line.take(word)
    return line.complete(incomplete)


class _Line:
    """Position on a command line: the current command, and the option whose value must follow."""

    def __init__(self, program: KnownCommand):
        self.command, self.known = program, True
        self.awaiting: KnownOption | None = None
        self.position, self.only_arguments = 0, False
        self.used: list[KnownOption] = []
        self.methods: set[str] = set()

    def take(self, word: str) -> None:
        """Advance past a complete word."""
        if self.awaiting is not None:
            self._value(self.awaiting, word)
            self.awaiting = None
        elif word == "--" and not self.only_arguments:
            self.only_arguments = True
        elif word.startswith("-") and word != "-" and not self.only_arguments:
            self._option(word)
        elif self.command.commands:
            self.known = self.known and word in self.command.commands
            self.command, self.used = self.command.commands.get(word, self.command), []
        else:
            self.position += 1

    def _option(self, word: str) -> None:
        name, equals, value = word.partition("=")
        option = next((one for one in self.command.options if name in one.names), None)
        if option is None:
            return
        self.used.append(option)
        if equals:
            self._value(option, value)
        elif option.value != "none":
            self.awaiting = option

    def _value(self, option: KnownOption, value: str) -> None:
        if any(name in ("--method", "--prefill", "--question-prefill") for name in option.names):
            self.methods.add(value)

    def complete(self, incomplete: str) -> Candidates:
        """Return the candidates for the incomplete word."""
        if not self.known:
            return Candidates()
        if self.awaiting is not None:
            return _values(self.awaiting, incomplete)
        if incomplete.startswith("-") and not self.only_arguments:
            name, equals, value = incomplete.partition("=")
            option = next((one for one in self.command.options if name in one.names), None)
            if equals and option is not None:
                return _values(option, value, before=f"{name}=")
            return Candidates(self._options(incomplete))
        if self.command.commands:
            below = self.command.commands
            return Candidates({name: one.help for name, one in below.items() if name.startswith(incomplete)})
        here = self.command.arguments[self.position : self.position + 1]
        found = _values(here[0], incomplete) if here else Candidates()
        if not (incomplete or found.words or found.files or self.only_arguments):
            found.words = self._options("--")
        return found

    def _options(self, incomplete: str) -> dict[str, str]:
        """Return the long options that begin with `incomplete`, or a short option that equals it, with descriptions.

        If the line names methods, and neither `all` nor `auto`, options of other methods are left out. An option that
        is already on the line is also left out, unless it is repeatable.
        """
        shown = [one for one in self.command.options if self._possible(one)]
        found = {name: one.help for one in shown for name in one.names if name.startswith(incomplete)}
        return {name: text for name, text in found.items() if name.startswith("--") or name == incomplete}

    def _possible(self, option: KnownOption) -> bool:
        of_another = bool(option.owners and self.methods) and self.methods.isdisjoint([*option.owners, "all", "auto"])
        return not of_another if option.repeatable else option not in self.used and not of_another


def _values(option: KnownOption, incomplete: str, before: str = "") -> Candidates:
    """Return the values of an option that begin with `incomplete`. `before` is put in front of each value."""
    words: Iterable[str] = option.choices
    files = ""
    if option.value == "index":
        words = _indices(incomplete)
    elif option.value == "model":
        words, files = [*option.choices, *filter(str.isprintable, named_models())], "folder"
    elif option.value in ("file", "folder"):
        files = option.value
    found = {f"{before}{word}": "" for word in words if word.startswith(incomplete)}
    return Candidates(found, files)


def _indices(incomplete: str) -> list[str]:
    """Return the folders whose path begins with `incomplete`: first those that end in `.skv`, then the others.

    The others get a slash at the end, because they may contain indices. Names with unprintable characters are left out.
    Hidden folders are left out if the last part of `incomplete` is empty.
    """
    head, slash, tail = incomplete.rpartition("/")
    folders = (entry.name for entry in os.scandir(os.path.expanduser(head) or slash or ".") if entry.is_dir())
    shown = (name for name in folders if name.isprintable() and (tail or not name.startswith(".")))
    found = (f"{head}{slash}{name}{'' if name.endswith('.skv') else '/'}" for name in shown if name.startswith(tail))
    return sorted(found, key=lambda name: (name.endswith("/"), name))


def answer(arguments: list[str], learn: Callable[[], KnownCommand]) -> None:
    """Print the candidates in the format that `ASK` describes. The function prints nothing else and raises nothing.

    Args:
        arguments: the shell's name, and the line (bash) or its words.
        learn: reads the options from the commands. This takes seconds.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C at a shell prompt is no error
    with suppress(Exception), open(os.devnull, "w") as nothing, redirect_stderr(nothing):
        prepare_streams()
        with redirect_stdout(nothing):
            lines = _lines(arguments, program(learn))
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()


def program(learn: Callable[[], KnownCommand]) -> KnownCommand:
    """Return the commands and options of the program from the cache. Without a valid cache, call `learn` and write the
    cache."""
    known = remembered()
    if known is None:
        known = learn()
        remember(known)
    return known


def _lines(arguments: list[str], known: KnownCommand) -> list[str]:
    shell, *words = arguments
    if shell == "bash":
        line = read_bash_line(*words)
        found = candidates(known, line.words[1:-1], line.words[-1])
        inserted = (line.insertion(word) for word in found.words)
        return [_kind(found), *(word for word in inserted if word is not None)]
    before, found = "", candidates(known, words[:-1], words[-1])
    if shell == "zsh" and words[-1].startswith("--"):  # zsh completes only the text after the equals sign
        before = words[-1][: words[-1].find("=") + 1]
    return [_kind(found), *(f"{word.removeprefix(before)}\t{about}" for word, about in found.words.items())]


def _kind(found: Candidates) -> str:
    is_open = bool(found.words) and all(word.endswith(("/", "=")) for word in found.words)
    return found.files or ("open" if is_open else "words")

"""The scripts that make bash, zsh and fish ask `sparsekv` for completions.

Typer's own are not used: theirs for zsh evaluates the answer and theirs for bash expands it, and an answer has names of
files in it that somebody else may have chosen.
"""

ASK = "__complete"
"""The first argument by which a script asks: then a shell's name, and the line (bash) or the words up to the cursor.

The answer's first line is `words`, `open` (no blank is to follow), `file` or `folder`. Each of the others is a word,
with a tab and what it is but for bash.
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

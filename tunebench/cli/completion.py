"""`tunebench completion`."""

from __future__ import annotations

from typing import Annotated

import typer

from tunebench.errors import UnknownName

__all__ = ["command"]

_BASH = r"""
_tunebench_completion() {
    local line="${COMP_LINE:0:COMP_POINT}" current
    current="${line##* }"
    local -a words
    read -r -a words <<< "$line"
    local count=$(( ${#words[@]} - 1 ))
    [[ "$line" == *" " ]] && count=$(( count + 1 ))
    local IFS=$'\n'
    COMPREPLY=( $(env COMP_WORDS="$line" COMP_CWORD="$count" _TUNEBENCH_COMPLETE=complete_bash tunebench) )
    # Bash replaces only what follows the last of its word breaks, such as : and =.
    local broken="${current%"${current##*[:=]}"}"
    [[ "$COMP_WORDBREAKS" == *:* && -n "$broken" ]] && COMPREPLY=( "${COMPREPLY[@]#"$broken"}" )
    return 0
}
complete -o nosort -o nospace -F _tunebench_completion tunebench
"""

_ZSH = r"""
#compdef tunebench
_tunebench_completion() {
    local line value
    local -a ended begun
    for line in ${(f)"$(env _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" _TYPER_COMPLETE_FISH_ACTION=get-args \
            _TUNEBENCH_COMPLETE=complete_fish tunebench)"}; do
        value="${${line%%$'\t'*}//:/\\:}"
        [[ "$line" == *$'\t'* ]] && line="$value:${line#*$'\t'}" || line="$value"
        # No space follows a text that is only begun, such as softmax: or rows=.
        case "$value" in *[:=/]) begun+=("$line") ;; *) ended+=("$line") ;; esac
    done
    (( $#ended )) && _describe -V tunebench ended
    (( $#begun )) && _describe -V tunebench begun -S ''
}
compdef _tunebench_completion tunebench
"""

_FISH = """
function __tunebench_complete
    env _TUNEBENCH_COMPLETE=complete_fish _TYPER_COMPLETE_FISH_ACTION=$argv[1] \\
        _TYPER_COMPLETE_ARGS=(commandline -cp) tunebench
end
complete --command tunebench --no-files --condition "__tunebench_complete is-args" \\
    --arguments "(__tunebench_complete get-args)"
"""

SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
"""The script of each shell."""


def command(
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="Shell that reads the script.")],
) -> None:
    """Print a script that completes commands, options, workloads and devices in a shell.

    Add to ~/.bashrc: eval "$(tunebench completion bash)". To ~/.zshrc, after compinit: eval "$(tunebench
    completion zsh)". For fish: tunebench completion fish > ~/.config/fish/completions/tunebench.fish.
    """
    if shell not in SCRIPTS:
        raise UnknownName("shell", shell, SCRIPTS)
    typer.echo(SCRIPTS[shell].strip())

"""Completion of commands, options and values in real shells."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tunebench.cli import _completion
from tunebench.cli.completion import SCRIPTS

LINES = {
    "tunebench tu": ["tune"],
    "tunebench plan cl": ["cluster"],
    "tunebench tune --finali": ["--finalists"],
    "tunebench lookup --device h100-s": ["h100-sxm"],
    "tunebench tune soft": ["softmax:"],
    "tunebench tune softmax:rows=8,dtype=f1": ["softmax:rows=8,dtype=f16"],
    "tunebench lookup -w resnet50/conv2_1": ["resnet50/conv2_1"],
    "tunebench show --variant softmax/cuda_sp": ["softmax/cuda_split", "softmax/cuda_split_backward"],
}
"""What is typed, and the completions."""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    program = tmp_path / "bin" / "tunebench"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m tunebench "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}


def _bash(line: str) -> list[str]:
    asked = f"COMP_LINE={line!r}; COMP_POINT=${{#COMP_LINE}}; _tunebench_completion"
    shown = "printf '%s\\n' \"${COMPREPLY[@]}\""
    return ["bash", "-c", f"COMP_WORDBREAKS=' '; {SCRIPTS['bash']}\n{asked}; {shown}"]


def _fish(line: str) -> list[str]:
    return ["fish", "--no-config", "-c", f"{SCRIPTS['fish']}\ncomplete --do-complete {line!r}"]


ZSH = r"""
zmodload zsh/zpty
zpty z zsh -f -i
zpty -w z "PROMPT=; autoload -Uz compinit; compinit -u -D; source $1; \
    shown() { print -r -- \"B\"\"UFFER=<\$BUFFER>\"; BUFFER= }; zle -N shown; bindkey '^X' shown; \
    print REA''DY"
zpty -r z out '*READY*'
for line in "${@[2,-1]}"; do
    zpty -w -n z "$line"$'\t'
    zpty -w -n z $'\x18'
    zpty -r z out '*BUFFER=<*>*'
    print -r -- "${${out##*BUFFER=<}%%>*}|"
done
zpty -d z
"""
"""Types lines into an interactive zsh, each with a tabulator, and prints what they become."""


def test_zsh_completes(environment: dict[str, str], tmp_path: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("no zsh")
    script = tmp_path / "completion.zsh"
    script.write_text(SCRIPTS["zsh"], encoding="utf-8")
    expected = {
        "tunebench plan cl": "tunebench plan cluster ",
        "tunebench lookup --device h100-s": "tunebench lookup --device h100-sxm ",
        "tunebench tune softm": "tunebench tune softmax:",
        "tunebench tune softmax:rows=8,dtype=f1": "tunebench tune softmax:rows=8,dtype=f16 ",
        "tunebench show --variant softmax/cuda_spl": "tunebench show --variant softmax/cuda_split",
    }
    words = ["zsh", "-f", "-c", ZSH, "zsh", str(script), *expected]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.splitlines() == [f"{line}|" for line in expected.values()], done.stderr


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_shell_completes(shell: str, environment: dict[str, str]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    command = {"bash": _bash, "fish": _fish}[shell]
    lines = list(LINES.items())[:: 1 if shell == "bash" else 3]
    for line, expected in lines:
        done = subprocess.run(command(line), env=environment, capture_output=True, text=True, check=False)
        completions = [row.partition("\t")[0] for row in done.stdout.splitlines()]
        assert [completion for completion in completions if completion in expected] == expected, (
            line,
            done.stdout,
            done.stderr,
        )


def test_bash_gets_what_follows_its_word_breaks(environment: dict[str, str]) -> None:
    command = _bash("tunebench tune softmax:rows=8,dtype=f1")
    command[2] = command[2].replace("COMP_WORDBREAKS=' '", "COMP_WORDBREAKS=' :='")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["f16"]


def test_next_dimensions_are_those_that_are_not_given() -> None:
    completions = _completion.workloads("softmax:rows=8,cols=8,")
    assert "softmax:rows=8,cols=8,dtype=" in completions
    assert not any(completion.startswith("softmax:rows=8,cols=8,rows") for completion in completions)
    assert _completion.workloads("nothing:") == _completion.workloads("nothing/") == []


def test_script_is_printed_and_another_shell_is_refused(run_text: Run, run_refused: Run) -> None:
    assert run_text("completion", "zsh").startswith("#compdef tunebench")
    assert "bash, fish, zsh" in run_refused("completion", "cmd")

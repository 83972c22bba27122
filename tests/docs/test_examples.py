"""Run every example of the README and of docs/ in the order of its page.

The language of a fenced block decides how it is run:

- ``console``: bash runs each line after ``$``, which must succeed. The lines below it are the expected
  output: ``...`` matches any text, and white space is ignored. Without such lines, any output is accepted.
- ``python``: run as a program.
- ``python torch``, ``python triton``: run as a program if the package is installed.
- ``python`` or ``toml`` whose first line is ``# file: NAME``: saved under that name.
- ``cpp``: compiled and run by a test of its package.
- ``console norun``: not run, because it changes the machine; a comment before it gives the reason.

The blocks of a page share a folder and a database. Pages share only the cache of compiled kernels, that of
all tests. A line that is only a `tunebench` command runs in a fork of a process that has imported the
commands, and a program in a fork of one that has imported the packages that most programs import
(tests/fork_server.py), as are the processes of a program that `torch.distributed.run` starts; bash runs every
other line. A search runs `MOST_TRIALS`, whatever the page shows.
"""

from __future__ import annotations

import doctest
import functools
import importlib.util
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.docs.example_process import COMMAND_MODULES, PACKAGES
from tests.fork_server import ForkServer
from tests.support import missing
from tunebench import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"console", "console norun", "python", "python torch", "python triton", "toml", "cpp", "sql"}
LANGUAGES |= {"diff", "text", "yaml"}

HAS_TORCH, HAS_TRITON = (importlib.util.find_spec(name) is not None for name in ("torch", "triton"))
HAS_FORK = missing("fork-server") is None

_BLOCK = re.compile(r"^```(?P<language>[^\n`]*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block with its language, text and first line."""

    language: str
    body: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(match["language"].strip(), match["body"], text.count("\n", 0, match.start()) + 1)
        for match in _BLOCK.finditer(text)
    ]


def commands(body: str) -> list[tuple[str, str]]:
    """Split a console block into commands, each with the output shown below it."""
    joined = re.sub(r"\s*\\\n\s*", " ", body)
    parts = re.split(r"^\$ (.*)\n?", joined, flags=re.MULTILINE)
    assert not parts[0].strip(), "a console block begins with a command"
    return list(zip(parts[1::2], parts[2::2], strict=True))


TORCH_MODULES = ("torch", "torch._dynamo", "torch._functorch.aot_autograd")
"""Modules that most programs with torch import."""

LAUNCHER = re.compile(
    r"(?:OMP_NUM_THREADS=1 )?python -m torch\.distributed\.run --standalone --nproc-per-node=(\d+) (\S+)"
)
"""Command that starts a program in several processes; `tests/torch/test_ddp.py` runs the launcher itself."""

SHELL_PUNCTUATION = "|&;<>()*?~"
"""Characters that mean something to bash outside of quotes, besides `$`, `#` and the backquote."""

TIMEOUT_S = 300

MOST_TRIALS = 2
"""Trials of a search: the default and what a sampler proposes. Each compiles a kernel, in about a second."""


def with_few_trials(text: str) -> str:
    """Return a command or program with at most `MOST_TRIALS` in each `--trials N` and `trials=N`."""
    limit = r"(--trials |\btrials=)(\d+)"
    return re.sub(limit, lambda match: f"{match[1]}{min(int(match[2]), MOST_TRIALS)}", text)


class Processes:
    """The servers whose forks run the examples; each starts when it is first used."""

    @functools.cached_property
    def commands(self) -> ForkServer:
        return ForkServer.start(COMMAND_MODULES, "tests.docs.example_process:import_commands")

    @functools.cached_property
    def programs(self) -> ForkServer:
        return ForkServer.start(PACKAGES)

    @functools.cached_property
    def torch_programs(self) -> ForkServer:
        return self.programs.extended(TORCH_MODULES)

    @functools.cached_property
    def tuning(self) -> ForkServer:
        """The server of `tunebench tune`, whose workers measure PyTorch if it is installed."""
        return self.commands.extended(["torch"] if HAS_TORCH else [])

    def run_line(self, line: str, folder: Path) -> str:
        """Run a line of a console block and return what it prints on stdout."""
        if HAS_FORK and (launched := LAUNCHER.fullmatch(line)):
            return self.run_ranks(folder / launched[2], int(launched[1]))
        words = shlex.split(line)
        if words[0] != "tunebench" or not HAS_FORK or has_shell_syntax(line):
            return run(["bash", "-c", line], folder)
        server = self.tuning if words[1] == "tune" else self.commands
        return run_fork(server, "run_command", words[1:], folder)

    def run_program(self, program: Path, *, torch: bool) -> None:
        """Run a program."""
        if not HAS_FORK:
            run([sys.executable, str(program)], program.parent)
        elif "tunebench.tune(" in program.read_text(encoding="utf-8"):
            run_fork(self.tuning, "run_tuning_program", [str(program)], program.parent)
        else:
            server = self.torch_programs if torch else self.programs
            run_fork(server, "run_program", [str(program)], program.parent)

    def run_ranks(self, program: Path, ranks: int) -> str:
        """Run a program in several processes that find one another, and return what they print."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        shared |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}

        def run_rank(rank: int) -> str:
            variables = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            return run_fork(self.torch_programs, "run_program", [str(program)], program.parent, variables)

        with ThreadPoolExecutor(ranks) as executor:
            return "".join(executor.map(run_rank, range(ranks)))

    def close(self) -> None:
        for server in reversed(vars(self).values()):
            server.close()


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    servers = Processes()
    yield servers
    servers.close()


def has_shell_syntax(line: str) -> bool:
    """Return whether bash would do more with a line than split it into words."""
    words = shlex.shlex(line, posix=True, punctuation_chars=SHELL_PUNCTUATION)
    words.whitespace_split = True
    return any(set(word) <= set(SHELL_PUNCTUATION) for word in words) or bool({"$", "#", "`"} & set(line))


def environment_of(folder: Path) -> Mapping[str, str]:
    scripts = Path(sys.executable).parent
    return {
        **os.environ,
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "TUNEBENCH_DB": str(folder / "tunebench.db"),
    }


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment_of(folder),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_fork(
    server: ForkServer,
    function: str,
    arguments: list[str],
    folder: Path,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Call a function of tests/docs/example_process.py in a fork; return what it prints on stdout."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors, open(os.devnull) as nothing:
        process = server.launch(
            f"tests.docs.example_process:{function}",
            *arguments,
            folder=folder,
            environment={**environment_of(folder), **variables},
            streams=[stream.fileno() for stream in (nothing, output, errors)],
        )
        try:
            exit_code = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        for stream in (output, errors):
            stream.seek(0)
        printed, complaints = output.read().decode(), errors.read().decode()
    assert exit_code == 0, f"exit code {exit_code}\n{printed}\n{complaints}"
    return printed


def same(shown: str, printed: str) -> bool:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(shown.strip() + "\n", printed.strip() + "\n", flags)


def test_output_check_accepts_matching_and_refuses_other_output() -> None:
    assert commands("$ a \\\n  b\nout\n$ c\n") == [("a b", "out\n"), ("c", "")]
    assert same("one ... three\n...", "one two  three\nfour")
    assert not same("one", "two")


def test_searches_have_few_trials() -> None:
    assert with_few_trials("tunebench tune w --trials 40 --db x") == "tunebench tune w --trials 2 --db x"
    assert with_few_trials("Plan(trials=6), n_trials=17, trials=1") == "Plan(trials=2), n_trials=17, trials=1"


def test_bash_runs_lines_with_shell_syntax() -> None:
    for line in ("a b > c", "a|b", "a; b", "a && b", "a $HOME", "a *.toml", "a  # why"):
        assert has_shell_syntax(line), line
    for line in ("a --b c=1,d=2", "a 'b|c*(d)'", 'a "8 x b, 2.5/h" --c "d=e|f"'):
        assert not has_shell_syntax(line), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_names_its_language(page: Path) -> None:
    assert {block.language for block in blocks(page)} <= LANGUAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_target_exists(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


RUN = {
    *("console", "python"),
    *(["python torch"] if HAS_TORCH else []),
    *(["python triton"] if HAS_TRITON else []),
}
RUNNABLE = [page for page in PAGES if any(block.language in RUN for block in blocks(page))]


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: str(page.relative_to(ROOT)))
def test_examples_of_page_run(page: Path, processes: Processes, tmp_path: Path) -> None:
    for block in blocks(page):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if block.language == "console":
            for command, shown in commands(block.body):
                printed = processes.run_line(with_few_trials(command), tmp_path)
                assert not shown.strip() or same(shown, printed), f"{where}: $ {command}\n{printed}"
        elif block.language == "toml" or block.language in RUN:
            named = re.match(r"# file: (\S+)\n", block.body)
            if block.language == "toml" and not named:
                continue
            target = tmp_path / (named[1] if named else f"example_{block.line}.py")
            text = with_few_trials(block.body.removeprefix(named[0]) if named else block.body)
            target.write_text(text, encoding="utf-8")
            if not named:
                processes.run_program(target, torch=block.language == "python torch")


def test_workflow_for_users_runs_known_commands() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML, of the extra `docs`, is not installed")
    (block,) = (b for b in blocks(ROOT / "docs" / "guide" / "ci.md") if b.language == "yaml")
    steps = yaml.safe_load(block.body)["jobs"]["check"]["steps"]
    (script,) = (step["run"] for step in steps if "tunebench check" in step.get("run", ""))
    (command,) = re.findall(r"tunebench (check [^|]*)", script)
    assert cli.run([*command.split(), "--help"]) == 0  # an unknown option is refused before


def test_guide_shows_kernel_of_examples_folder() -> None:
    guide = ROOT / "docs" / "guide" / "own-kernel.md"
    shown = [b.body for b in blocks(guide) if b.body.startswith("# file: my_kernel.py\n")]
    example = (ROOT / "docs" / "examples" / "my_kernel.py").read_text(encoding="utf-8")
    assert [body.split("\n", 1)[1] for body in shown] == [example]

"""A folder of a stranger: every file in it that some program might run leaves a mark."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

__all__ = ["MARK", "build", "marks"]

MARK = "was-here"
"""First part of the names of the files that the files of the folder write."""

_PYTHON = """import os, sys
open(os.path.join({marks!r}, "{mark}-{name}-" + str(os.getpid())), "w").write(" ".join(sys.orig_argv))
"""
_PROGRAM = "#!/bin/sh\necho $0 $* > {marks}/{mark}-{name}\nexit 1\n"
_HEADER = '#error "a header of the current folder was read"\n'
_SETTINGS = {
    ".numba_config.yaml": "disable_jit: 1\nopt: 0\ncache_dir: {folder}/numba\ncuda_log_level: debug\n",
    "matplotlibrc": "figure.facecolor: black\ntext.usetex: True\nbackend: module://evil_backend\n",
    "pyproject.toml": "[tool.other]\nname = 1\n[tool.numba]\ndisable_jit = 1\n[build-system]\nrequires=[]\n",
    "setup.cfg": "[options.entry_points]\ntunebench.variants =\n  evil = evil\n[tool:pytest]\naddopts=-p x\n",
    "alembic.ini": "[alembic]\nscript_location = {folder}\n",
    "pytest.ini": "[pytest]\naddopts = -p evil\n",
    "tox.ini": "[pytest]\naddopts = -p evil\n",
    ".env": "UVICORN_APP=evil:app\nTUNEBENCH_DB=/dev/zero\n",
    ".pdbrc": "import evil\n",
    "ray.yaml": "head_node: evil\n",
    "evil.pth": "import evil\n",
    "pg_service.conf": "[default]\nhost=evil\n",
    ".git/config": "[core]\nfsmonitor = {folder}/git\npager = {folder}/git\n",
    "pybuilddir.txt": "{folder}",
    "_ops.py": "import evil\n",
    "_classes.py": "import evil\n",
    "specs": "*cc1plus:\n-fevil\n",
    "nvcc.profile": "INCLUDES += -I{folder}\n",
    "evil.egg-info/entry_points.txt": "[tunebench.variants]\nevil=evil\n",
    "evil.egg-info/PKG-INFO": "Metadata-Version: 2.1\nName: evil\nVersion: 1\n",
}
_HEADERS = (
    *(
        "shim/cuda.h",
        "shim/runtime.h",
        "cuda.h",
        "runtime.h",
        "interface.h",
        "algorithm",
        "vector",
        "cstdint",
    ),
    *("kernel", "__nv_name_map", "__nv_nvrtc_builtin_header.h"),
    *("cuda_fp16.h", "cuda_runtime.h", "cuda/std/cstdint", "mma.h"),
)
_NAMES = (
    "cpu",
    "h100-sxm",
    "a100-sxm-80",
    "sm_90",
    "gpt2",
    "softmax",
    "nvlink4",
    "bash",
    "local",
    "softmax:rows=8,cols=64,dtype=f32",
)
"""Names of devices, models and workloads: a file of the same name is not read."""
_PROGRAMS = (
    "g++",
    "c++",
    "gcc",
    "cc1plus",
    "as",
    "ld",
    "ld.gold",
    "collect2",
    "nvcc",
    "nvdisasm",
    "cuobjdump",
    "addr2line",
    "git",
    "ptxas",
    "nvidia-smi",
    "lscpu",
    "ldconfig",
    "uname",
    "ray",
    "raylet",
)
_MODULES = (
    "tunebench",
    "sitecustomize",
    "usercustomize",
    "conftest",
    "evil",
    "evil_backend",
    "setup",
    "yaml",
    "tests",
)


def build(folder: Path, marks: Path) -> None:
    """Fill a folder with modules, programs, headers and settings of every name that something may look for.

    Args:
        folder: An empty folder.
        marks: Folder in which a file that is run leaves a mark.
    """
    modules = {*_MODULES, *sys.stdlib_module_names, *metadata.packages_distributions()}
    for name in sorted(name for name in modules if name.isidentifier()):
        text = _PYTHON.format(marks=str(marks), mark=MARK, name=name)
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    for name in _PROGRAMS:
        program = folder / name
        program.write_text(_PROGRAM.format(marks=marks, mark=MARK, name=name), encoding="utf-8")
        program.chmod(0o755)
    for name in _NAMES:
        write(folder / name, "hostile")
    for name in _HEADERS:
        write(folder / name, _HEADER)
    for name, text in _SETTINGS.items():
        write(folder / name, text.replace("{folder}", str(folder)))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def marks(folder: Path) -> list[str]:
    """Return what the marks in a folder say: which file was run, and by which command."""
    return [f"{mark.name}: {mark.read_text()}" for mark in sorted(folder.glob(f"{MARK}-*"))]


def main() -> None:
    """Run the commands of the first argument as `tunebench` does; print exit codes and output as JSON."""
    import contextlib
    import io
    import json

    from tunebench import cli

    printed = []
    for arguments in json.loads(sys.argv[1]):
        sys.argv[1:] = arguments
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            try:
                cli.main()
            except SystemExit as end:
                printed.append(f"{end.code}\n{output.getvalue()}")
    sys.stdout.write(json.dumps(printed))


if __name__ == "__main__":
    main()

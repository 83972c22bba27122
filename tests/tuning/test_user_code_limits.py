"""User code that fails or never returns, in tuner and workers: it ends one variant or configuration."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.kernel_faults import kernel_faults
from tunebench._user_code import limit_user_code
from tunebench.device import find
from tunebench.errors import InputError, UnknownName, VariantError
from tunebench.kernels import load_file, loaded_files, variant, variant_file_scope
from tunebench.task import revision_of
from tunebench.tuning.tunable import find_variants
from tunebench.workloads import parse

BOUNDED = (Path(__file__).parents[1] / "data" / "bounded_variant.py").read_text()
WORKLOAD = "softmax:rows=33,cols=65,dtype=f32"
LOOP = "while True: pass"

STAGES = {
    "import": (BOUNDED + f"\n{LOOP}\n", "the import of "),
    "constraint": (
        BOUNDED.replace('"nothing"),))', '"nothing"),), (endless,))').replace(
            "class Bounded", f"def endless(copy):\n    {LOOP}\n\n\nclass Bounded"
        ),
        "softmax/bounded: a constraint of its space",
    ),
    "default": (
        BOUNDED.replace("return Config", f"{LOOP}\n        return Config"),
        "softmax/bounded: default",
    ),
    "costs": (
        BOUNDED.replace("a_microsecond = ", f"{LOOP}\n        a_microsecond = "),
        "softmax/bounded: costs",
    ),
    "limits": (
        BOUNDED.replace(
            "    def default(", f"    def limits(self, workload, device):\n        {LOOP}\n\n    def default("
        ),
        "softmax/bounded: limits",
    ),
    "generated": (
        BOUNDED.replace(
            "    def default(",
            f"    def generated(self, workload, config):\n        {LOOP}\n\n    def default(",
        ),
        "softmax/bounded: revision",
    ),
}
"""Files whose code loops for ever in the tuner, and what the message names."""


@pytest.fixture
def loaded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Yield a variant file with a loop; it is forgotten afterwards."""
    path = tmp_path / "endless.py"
    path.write_text(STAGES[request.param][0])
    with variant_file_scope():
        yield path


@pytest.mark.parametrize("loaded", [name for name in STAGES if name != "import"], indirect=True)
def test_code_of_a_variant_that_never_returns_is_a_reason_to_skip_it(
    loaded: Path, request: pytest.FixtureRequest
) -> None:
    names = STAGES[request.node.callspec.params["loaded"]][1]
    key = load_file(loaded).key
    with limit_user_code(0.2), pytest.raises(InputError, match="no variant can do") as error:
        find_variants(parse(WORKLOAD), find("cpu"), [key])
    assert f"{names} did not return within 0.2 s ({loaded}, line " in str(error.value)


@pytest.mark.parametrize("loaded", ["import"], indirect=True)
def test_command_ends_with_the_file_whose_import_never_returns(loaded: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from tunebench import kernels, cli; kernels.IMPORT_S = 0.5; "
        "sys.exit(cli.run(sys.argv[1:]))"
    )
    command = ["tune", "--workload", WORKLOAD, "--variant-file", str(loaded), "--db", str(tmp_path / "a.db")]
    ended = subprocess.run(
        [sys.executable, "-c", program, *command], capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 2
    assert f"the import of {loaded} did not return within 0.5 s ({loaded}, line " in ended.stderr
    assert "Traceback" not in ended.stderr


FAILS_ONCE = BOUNDED.replace(
    "    def default(",
    "    def generated(self, workload, config):\n"
    "        if config['copy'] == 3:\n"
    "            raise ValueError('no source')\n"
    "        return ''\n\n"
    "    def default(",
)


def test_configuration_without_a_source_has_a_revision_that_ends_with_the_failure(tmp_path: Path) -> None:
    path = tmp_path / "failing.py"
    path.write_text(FAILS_ONCE)
    with variant_file_scope():
        variant = load_file(path)
    workload, space = parse(WORKLOAD), variant.space
    revisions = [revision_of(variant, workload, space.parse(f"copy={copy}")) for copy in (3, 3, 4)]
    assert revisions[0] == revisions[1] != revisions[2]
    with pytest.raises(VariantError, match="no source"):
        variant.revision(workload, space.parse("copy=3"))


@pytest.mark.slow
def test_kernels_that_fail_in_a_few_ways_are_outcomes_and_end_no_run(tmp_path: Path) -> None:
    """`nox -s faults -- kernels` runs all of them."""
    faults = kernel_faults(tmp_path, every=False, timeout_s=3.0)
    assert not faults.wrong, faults.table()
    assert faults.exit_codes == [0, 0]


def test_scope_forgets_the_files_that_were_loaded_within_it(tmp_path: Path) -> None:
    path = tmp_path / "scoped.py"
    path.write_text(BOUNDED)
    with variant_file_scope(empty=True):
        assert not loaded_files()
        loaded = load_file(path)
        assert variant(loaded.key) is loaded
        with variant_file_scope(empty=True), pytest.raises(UnknownName, match=loaded.key):
            variant(loaded.key)
        assert variant(loaded.key) is loaded
        assert loaded_files() == (str(path),)
    with pytest.raises(UnknownName, match=loaded.key):
        variant(loaded.key)

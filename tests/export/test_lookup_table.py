"""The lookup table for C++: its answers are those of Python, and damaged files are refused."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import measured
from tunebench.answer import lookup_workload
from tunebench.answer._estimate import workload_distance
from tunebench.db import RunStart, TrialKey, open_store
from tunebench.device import Device, described
from tunebench.errors import InputError, UnknownName
from tunebench.export import lookup_table
from tunebench.export.lookup_table import HEADER, TableEntry, look_up_all, recorded_workloads, write_table
from tunebench.kernels import variant
from tunebench.outcome import Result
from tunebench.space import Config
from tunebench.workload import Workload
from tunebench.workloads import all_operators, parse

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
SXM, PCIE, A100 = (described()[name] for name in ("h100-sxm", "h100-pcie", "a100-80-sxm"))
VARIANTS = {
    "softmax": "softmax/cuda_block",
    "gemm": "gemm/cuda_simt",
    "attention": "attention/cuda_simt",
}
TUNED = [
    *(f"softmax:rows={rows},cols={cols},dtype=f32" for rows in (64, 512) for cols in (128, 1000, 4096)),
    *("softmax:rows=512,cols=128,dtype=f16", "softmax:rows=64,cols=128,dtype=f32,log=true"),
    *(f"gemm:m={m},n=256,k={k},dtype=f32" for m in (64, 256, 2048) for k in (64, 1024)),
    *("gemm:m=64,n=256,k=64,dtype=f32,trans=nt", "gemm:m=64,n=256,k=64,dtype=f32,epilogue=bias"),
]


def record(db: str, device: Device, text: str, number: int) -> None:
    """Record a measured time of one of the configurations of a workload."""
    workload = parse(text)
    kernel = variant(VARIANTS[workload.operator])
    configs = kernel.configs(workload, device)
    config = configs.config(number % len(configs))
    with open_store(db) as store:
        store.begin_run(RunStart(device=device, workload=text, sampler="bound", seed=0))
        key = TrialKey(
            device=device.key,
            workload=text,
            variant=kernel.key,
            revision=kernel.revision(workload, config),
            config=config,
        )
        store.record(key, Result(outcome=measured(10.0 + number)), bound_us=0.01)


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("db") / "answers.db")
    for number, text in enumerate(TUNED):
        record(path, SXM, text, number)
    for number, text in enumerate(TUNED[:3]):
        record(path, A100, text, number + 7)
    record(path, PCIE, TUNED[0], 11)
    return path


@pytest.fixture(scope="module")
def entries(db: str) -> list[TableEntry]:
    entries, missing = look_up_all(recorded_workloads([SXM], db), [SXM], db)
    assert not missing
    assert len(entries) == len(TUNED)
    more, _ = look_up_all(TUNED[:3], [A100], db)
    pcie, _ = look_up_all(TUNED[:1], [PCIE], db)
    return [*entries, *more, *pcie]


def compiled(folder: Path, *flags: str) -> Path:
    program = folder / "lookup"
    command = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", *flags, f"-I{folder}", "-o", str(program)]
    command.append(str(Path(__file__).with_name("lookup_table.cpp")))
    subprocess.run(command, check=True, capture_output=True, text=True)
    return program


@pytest.fixture(scope="module")
def table(entries: list[TableEntry], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_table(entries, tmp_path_factory.mktemp("table") / "kernels.table")[0]


@pytest.fixture(scope="module")
def program(table: Path) -> Path:
    return compiled(table.parent)


# -- answers as in Python -----------------------------------------------------------------------------------


def expected(entries: list[TableEntry], db: str, workload: Workload, device: Device) -> str:
    """Return the answer that the table must give: of Python's lookup, its distance, or its default."""
    of_architecture = [entry for entry in entries if entry.device.architecture == device.architecture]
    apart = {entry.device.key: abs(entry.device.sm_count - device.sm_count) for entry in of_architecture}
    ordered = sorted(
        of_architecture, key=lambda entry: (entry.device.key != device.key, apart[entry.device.key])
    )
    alike = [entry for entry in ordered if entry.workload == workload]
    if alike:
        answer = lookup_workload(workload, device=alike[0].device, db=db)
        return described_answer("exact", alike[0], answer.config)
    comparable = [
        (distance, entry)
        for entry in ordered
        if entry.workload.operator == workload.operator
        and (distance := workload_distance(workload, entry.workload)) is not None
    ]
    if comparable:
        _, nearest = min(comparable, key=lambda pair: pair[0])
        return described_answer("nearest", nearest, nearest.answer.config)
    same_operator = [entry for entry in ordered if entry.workload.operator == workload.operator]
    if not same_operator:
        return "none"
    like = min(
        same_operator, key=lambda entry: (others(workload, entry.workload), distance_but(workload, entry))
    )
    default = variant(like.answer.variant).default(like.workload, like.device)
    return described_answer("fallback", like, default)


def others(workload: Workload, compared: Workload) -> int:
    """Return how many dimensions differ that a neighbour must share."""
    names = (name for name in workload.dimensions() if not _may_differ(workload, name))
    return sum(getattr(workload, name) != getattr(compared, name) for name in names)


def _may_differ(workload: Workload, name: str) -> bool:
    changes = workload.allowed_changes
    value = getattr(workload, name)
    return type(value) in (int, float) or name in (*changes.fusions, *changes.layouts)


def distance_but(workload: Workload, entry: TableEntry) -> float:
    """Return the distance without the dimensions that a neighbour must share."""
    shared = {
        name: getattr(workload, name) for name in workload.dimensions() if not _may_differ(workload, name)
    }
    distance = workload_distance(workload, entry.workload.changed(**shared))
    assert distance is not None
    return distance


def described_answer(kind: str, entry: TableEntry, config: Config) -> str:
    values = "".join(f" {name}={value}" for name, value in sorted(config.items()))
    return f"{kind} {entry.workload} on {entry.device.key} {entry.answer.variant}{values}"


def queries(count: int) -> Iterator[tuple[str, Device]]:
    """Yield workloads that are in the table, near ones, and ones without a neighbour, in any spelling."""
    random_numbers = random.Random(1)
    for _ in range(count):
        text = random_numbers.choice(TUNED)
        name, _, dimensions = text.partition(":")
        parts = dict(part.split("=") for part in dimensions.split(","))
        for dimension in parts:
            if parts[dimension].isdigit() and random_numbers.random() < 0.3:
                parts[dimension] = str(random_numbers.randint(1, 5000))
        if random_numbers.random() < 0.2:
            parts["dtype"] = "bf16"
        if name == "softmax" and random_numbers.random() < 0.1:
            parts["log"] = random_numbers.choice(["true", "False", "1"])
        items = [f" {key} = {value}" for key, value in parts.items()]
        random_numbers.shuffle(items)
        yield f"{name}:{','.join(items)}", random_numbers.choice([SXM, PCIE, A100])


@needs_compiler
@pytest.mark.slow
def test_thousand_lookups_answer_as_python(
    entries: list[TableEntry], db: str, table: Path, program: Path
) -> None:
    asked = list(queries(1000))
    lines = "".join(f"{text}\t{device.key}\t0\n" for text, device in asked)
    printed = subprocess.run([program, table], input=lines, capture_output=True, text=True, check=True).stdout
    results = printed.splitlines()
    assert results == [expected(entries, db, parse(text), device) for text, device in asked]
    for kind, least in (("exact", 200), ("nearest", 200), ("fallback", 100), ("none", 5)):
        assert sum(line.startswith(kind) for line in results) >= least


@needs_compiler
@pytest.mark.slow
def test_devices_by_architecture_and_malformed_workloads(table: Path, program: Path) -> None:
    asked = {
        f"{TUNED[0]}\tsm_90\t114": f"exact {TUNED[0]} on {PCIE.key}",
        f"{TUNED[0]}\tsm_90\t132": f"exact {TUNED[0]} on {SXM.key}",
        f"{TUNED[0]}\tsm_120\t0": "none",
        "layernorm:rows=8,cols=8,dtype=f32\tsm_90\t0": "none",
        "softmax\tsm_90\t0": "workload 'softmax' is not operator:dimension=value,...",
        "softmax:rows=64,cols=128\tsm_90\t0": "softmax: missing dtype",
        "softmax:rows=64,rows=1\tsm_90\t0": "softmax: 'rows' is given twice",
        "softmax:rows=64,columns=1\tsm_90\t0": "softmax: unknown dimension 'columns'",
        "softmax:rows=9999999999,cols=1\tsm_90\t0": "softmax: rows='9999999999' must be a 32-bit",
        "softmax:rows=1.5,cols=1\tsm_90\t0": "softmax: rows='1.5' must be a 32-bit whole number",
        "softmax:rows\tsm_90\t0": "softmax: expected dimension=value, got 'rows'",
        "softmax:rows=1,log=maybe\tsm_90\t0": "softmax: log='maybe' must be true or false",
    }
    lines = "".join(f"{line}\n" for line in asked)
    printed = subprocess.run([program, table], input=lines, capture_output=True, text=True, check=True).stdout
    for line, start in zip(printed.splitlines(), asked.values(), strict=True):
        assert line.startswith(start)


# -- damaged files ------------------------------------------------------------------------------------------


def with_checksum(lines: list[str]) -> str:
    """Return a table of which only the contents are damaged."""
    body = "".join(lines)
    return f"{body}end\t{lookup_table._checksum(body.encode())}\n"


def damaged_tables(text: str) -> Iterator[str]:
    """Yield truncated and garbled tables, most of them with a checksum of their own."""
    random_numbers = random.Random(2)
    lines = text.splitlines(keepends=True)[:-1]
    for _ in range(40):
        yield text[: random_numbers.randrange(len(text))]
        at = random_numbers.randrange(len(text))
        yield text[:at] + chr(random_numbers.randrange(1, 256)) + text[at + 1 :]
    for _ in range(400):
        changed = list(lines)
        row = random_numbers.randrange(len(changed))
        fields = changed[row].rstrip("\n").split("\t")
        at = random_numbers.randrange(len(fields))
        garbage = ("", "-1", "999999999999999999999", "1e999", "nan", "x", "\\", "true", "4294967296", "0")
        match random_numbers.randrange(4):
            case 0:
                fields[at] = random_numbers.choice(garbage)
            case 1:
                del fields[at]
            case 2:
                fields.insert(at, random_numbers.choice(garbage))
            case 3:
                changed[row] = changed[random_numbers.randrange(len(changed))]
                fields = changed[row].rstrip("\n").split("\t")
        changed[row] = "\t".join(fields) + "\n"
        yield with_checksum(changed)


@needs_compiler
@pytest.mark.slow
def test_damaged_tables_are_errors_and_never_undefined_behaviour(table: Path, tmp_path: Path) -> None:
    shutil.copy(table.with_name(HEADER), tmp_path / HEADER)
    program = compiled(tmp_path, "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g0")
    files = []
    for number, text in enumerate(damaged_tables(table.read_text())):
        files.append(tmp_path / f"{number}.table")
        files[-1].write_text(text, encoding="latin-1")
    run = subprocess.run([program, table, *files], capture_output=True, check=False)
    assert (run.returncode, run.stderr) == (0, b"")
    printed = run.stdout.decode(errors="replace").splitlines()
    refused = [line for line in printed if not line.startswith("read ")]
    assert len(refused) > 300
    assert all(", line " in line or line.startswith("softmax: ") for line in refused)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda text: "", "line 1: the file is truncated"),
        (lambda text: "{}\n", "line 1: this is no lookup table of tunebench"),
        (lambda text: text.replace("-table\t1", "-table\t2", 1), "expected format 1"),
        (lambda text: text.replace("rows=64", "rows=65", 1), "its checksum differs"),
        (lambda text: text + "more\n", "there is something after the last line"),
    ],
)
@needs_compiler
@pytest.mark.slow
def test_reason_of_a_refused_table(
    damage: Callable[[str], str], says: str, table: Path, tmp_path: Path, program: Path
) -> None:
    file = tmp_path / "damaged.table"
    file.write_text(damage(table.read_text()))
    printed = subprocess.run([program, table, file], capture_output=True, text=True, check=True).stdout
    assert says in printed
    assert str(file) in printed


# -- writing ------------------------------------------------------------------------------------------------


def test_every_operator_can_be_described() -> None:
    for cls in all_operators().values():
        assert next(iter(lookup_table._operator_fields(cls))) == cls.operator
        assert len(list(lookup_table._operator_fields(cls))) > 2


def test_table_without_answers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="one answer or more"):
        write_table([], tmp_path / "empty.table")


def test_workloads_without_an_answer_are_named(db: str) -> None:
    entries, missing = look_up_all(["softmax:rows=2147483647,cols=2147483647,dtype=f32"], [SXM], db)
    assert not entries
    assert list(missing) == [f"softmax:rows=2147483647,cols=2147483647,dtype=f32 on {SXM.key}"]


def test_unknown_operator_is_an_error(db: str) -> None:
    with pytest.raises(UnknownName):
        look_up_all(["soft:rows=1"], [SXM], db)


@needs_compiler
@pytest.mark.slow
def test_program_of_the_guide_prints_an_answer(tmp_path: Path, db: str) -> None:
    page = Path(__file__).parents[2] / "docs" / "guide" / "export.md"
    source = page.read_text(encoding="utf-8").partition("// file: lookup.cpp\n")[2].partition("```")[0]
    write_table(look_up_all(TUNED[:1], [SXM], db)[0], tmp_path / "kernels.table")
    (tmp_path / "lookup.cpp").write_text(source)
    command = ("g++", "-std=c++17", "-Wall", "-Werror", "-o", "lookup", "lookup.cpp")
    subprocess.run(command, cwd=tmp_path, check=True)
    printed = subprocess.run([tmp_path / "lookup"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert printed.stdout.startswith("nearest softmax/cuda_block")

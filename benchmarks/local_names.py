"""Share of local names that do not say what they hold, in folders of Python files.

    python -m benchmarks.local_names [FOLDER ...] [--draw 40] [--seed 0] [--top 8] [--list]

A binding is a name that a parameter, an assignment, a loop, a comprehension, `with`, `except`, a pattern or
`:=` introduces. Attributes, fields of classes and imports do not count. A name counts as empty if it is one
of `EMPTY`, except where it is a term: `other` as the operand of an operator's method, `left` in a scope with
`right`, `ends` in a scope with `starts`. The share is a trend to watch and no gate: `item` is no better than
`each`, and a reader of the names drawn with `--draw` sees that, but the share does not.
"""

from __future__ import annotations

import argparse
import ast
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

EMPTY_WORDS = """
each found one ones place places known given held of most again other others here there ahead behind what how
wanted left said kept own met ends
"""
EMPTY = frozenset(EMPTY_WORDS.split())
TERMS = {"left": "right", "ends": "starts"}
"""Names that are a term in a scope that also binds the second name."""

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Binding(NamedTuple):
    """A local name, where it is bound, and whether it is one of `EMPTY`."""

    path: Path
    line: int
    name: str
    empty: bool


def bindings(path: Path) -> Iterator[Binding]:
    """Yield the bindings of a file, each scope's in the order of the lines."""
    scopes: list[tuple[ast.AST, str]] = [(ast.parse(path.read_bytes()), "")]
    while scopes:
        scope, title = scopes.pop()
        bound: list[tuple[int, str]] = []
        nodes = list(ast.iter_child_nodes(scope))
        while nodes:
            node = nodes.pop()
            if isinstance(node, Function | ast.ClassDef):
                scopes.append((node, getattr(node, "name", "")))
                continue
            nodes.extend(ast.iter_child_nodes(node))
            bound.extend((getattr(node, "lineno", 0), name) for name in _bound(node))
        if isinstance(scope, ast.ClassDef):
            continue
        names = {name for _, name in bound}
        for line, name in sorted(bound):
            term = TERMS.get(name) in names or (name == "other" and title.startswith("__"))
            yield Binding(path, line, name, name in EMPTY and not term)


def _bound(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            yield name
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            yield name


def main() -> None:
    """Print the share of each folder, its most frequent empty names, and names drawn at random."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "folders", nargs="*", type=Path, default=[Path("tunebench")], help="default: tunebench"
    )
    parser.add_argument("--top", type=int, default=8, help="frequent empty names to print")
    parser.add_argument("--draw", type=int, default=0, help="names to draw at random from each folder")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw")
    parser.add_argument("--list", action="store_true", help="print the line of every empty name")
    options = parser.parse_args()
    for folder in options.folders:
        files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]
        names = [name for path in files for name in bindings(path)]
        empty = [name for name in names if name.empty]
        frequent = Counter(name.name for name in empty).most_common(options.top)
        share = len(empty) / max(len(names), 1)
        words = ", ".join(f"{name} {count}" for name, count in frequent)
        print(f"{folder}: {len(empty)} of {len(names)} bindings ({share:.2%}): {words}")
        drawn = random.Random(options.seed).sample(names, min(options.draw, len(names)))
        for binding in empty if options.list else drawn:
            print(f"  {binding.path}:{binding.line}: {binding.name}")


if __name__ == "__main__":
    main()

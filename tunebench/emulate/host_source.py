"""Rewriting of CUDA C++ to host C++: what no macro can translate, shared memory and launch bounds.

Shared memory must be common to all threads, filled with a poison before every block, and guarded at both
ends, also if a template declares it. A static variable is not: compilers guard and place those of templates
as they like. Therefore every declaration becomes a reference to memory of the emulator. A kernel begins with
a call that declares its launch bounds. Line numbers are unchanged.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from tunebench.errors import TunebenchError

__all__ = ["NotEmulated", "as_host_cxx", "closing_parenthesis"]

_ALIGNMENT = r"(?:__align__|alignas)\s*\([^()]*(?:\([^()]*\)[^()]*)*\)"
_QUALIFIERS = rf"(?:(?:extern|static|volatile|const|{_ALIGNMENT})\s*)*"
_DECLARATION = re.compile(rf"({_QUALIFIERS})\b__shared__\b([^;]*);")
_BOUNDS = re.compile(r"\b__launch_bounds__\s*(?=\()")
_OPENING, _CLOSING = "([{<", ")]}>"


class NotEmulated(TunebenchError):
    """The emulator cannot run a kernel, which may be correct: its source or this machine is beyond it."""


def as_host_cxx(source: str) -> str:
    """Rewrite the declarations of shared memory and the launch bounds in `source`, and blank its comments.

    `__shared__ T a[2], b;` becomes a struct with these members, and a reference to each of them in the memory
    that the emulator keeps for the struct. `extern __shared__ T c[];` becomes a reference to the address of
    the block's dynamic shared memory, which all such arrays share. `__launch_bounds__(a, b) f(…) {` becomes
    `f(…) { emulated::launch_bounds(a, b);`.

    Raises:
        NotEmulated: A declaration has another form; the message quotes it.
    """
    numbers = itertools.count()
    return _with_bounds(_DECLARATION.sub(lambda match: _rewritten(match, numbers), _without_comments(source)))


def _without_comments(source: str) -> str:
    pattern = r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\')'
    return re.sub(pattern, lambda m: m[1] or " " + "\n" * m[0].count("\n"), source, flags=re.DOTALL)


def _with_bounds(source: str) -> str:
    """Move the arguments of each `__launch_bounds__` into a call at the start of the kernel."""
    parts, at = [], 0
    for match in _BOUNDS.finditer(source):
        end = closing_parenthesis(source, match.end())
        body = re.compile(r"\s*\{").match(source, closing_parenthesis(source, source.find("(", end)))
        parts += [source[at : match.start()], "\n" * source.count("\n", match.start(), end)]
        at = end
        if body:  # a definition
            bounds = source[match.end() : end].replace("\n", " ")
            parts += [source[end : body.end()], f" emulated::launch_bounds{bounds};"]
            at = body.end()
    return "".join([*parts, source[at:]])


def closing_parenthesis(source: str, start: int) -> int:
    """Return the index after the parenthesis that closes another one.

    Args:
        source: C++ without comments.
        start: Index of the opening parenthesis.

    Raises:
        NotEmulated: There is none.
    """
    depth = 0
    for at in range(start, len(source)):
        depth += {"(": 1, ")": -1}.get(source[at], 0)
        if depth == 0:
            return at + 1
    raise NotEmulated(f"expected a closing parenthesis after `{source[start : start + 40]}`, found none")


def _rewritten(match: re.Match[str], numbers: Iterator[int]) -> str:
    qualifiers, declaration = match[1], match[2]
    words = " ".join((re.sub(r"\b(?:extern|static)\b", "", qualifiers) + declaration).split())
    if "extern" in qualifiers:
        text = _dynamic(words)
    else:
        names = [_name(declarator) for declarator in _split(words)]
        struct = f"tunebench_shared_{next(numbers)}"
        members = "".join(f" auto& {name} = emulated::static_shared<{struct}>().{name};" for name in names)
        text = f"struct {struct} {{ {words}; }};{members}"
    return text + "\n" * match[0].count("\n")


def _dynamic(words: str) -> str:
    match = re.fullmatch(rf"(?:{_ALIGNMENT}\s*)*(.+?)\s*\b(\w+)\s*\[\s*\]", words)
    if match is None:
        raise NotEmulated(f"expected `extern __shared__ T name[]`, got `extern __shared__ {words};`")
    return f"{match[1]}*& {match[2]} = reinterpret_cast<{match[1]}*&>(emulated::dynamic_shared);"


def _split(words: str) -> list[str]:
    """Split a declaration at its commas, except those within brackets of any kind."""
    parts, depth = [""], 0
    for character in words:
        depth += (character in _OPENING) - (character in _CLOSING)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _name(declarator: str) -> str:
    """Return the name that a declarator such as `float tile[2][N + 1]` declares."""
    match = re.fullmatch(r"(?:.*\W)?([A-Za-z_]\w*)\s*(?:\[.*\])?\s*", declarator)
    if match is None:
        raise NotEmulated(
            f"expected `__shared__ T name` or `__shared__ T name[N]`, got `__shared__ {declarator}`"
        )
    return match[1]

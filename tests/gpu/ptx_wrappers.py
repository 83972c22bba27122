"""Discovery of the functions in kernels/*.cuh that wrap inline PTX."""

from __future__ import annotations

import re

from tunebench.kernels import headers, include
from tunebench.variant import strip_comments

__all__ = ["files", "wrappers", "wrappers_in"]


def wrappers() -> dict[str, str]:
    """Return the file of every function of the .cuh files that wraps inline PTX.

    Keys are names as called: `mma_m16n8k16_f16`; a template specialisation with its arguments
    (`from_float<half_t>`); an overload with the type of its first parameter (`to_float(half_t)`).
    """
    return {name: f"{file}.cuh" for file in sorted(files()) for name in wrappers_in(include(f"{file}.cuh"))}


def files() -> frozenset[str]:
    """Return the names of the helper files, as `tunebench.kernels.common.cuda.helpers` takes them."""
    return frozenset(name.removesuffix(".cuh") for name in headers())


_FUNCTION = re.compile(
    r"\b(?:__device__|__host__|__forceinline__|inline)\s+(?:[\w:]+(?:<[^;{}()]*?>)?[\s&*]+)+?"
    r"(\w+(?:<[\w:, ]+>)?)\s*\(([^;{}]*?)\)\s*(?:const\s*)?\{"
)


def wrappers_in(source: str) -> list[str]:
    """Return the functions of a source whose body contains inline assembly, directly or by a macro."""
    # Lines of kernels that only rows with edges have, in place of others (`kernels_for_rows`).
    source = re.sub(r"^.*  // edges\n", "", source, flags=re.MULTILINE)
    source = strip_comments(source)
    macros = _assembling_macros(source)
    code = re.sub(r"^#.*(?:(?<=\\)\n.*)*", "", source, flags=re.MULTILINE)
    assembling = re.compile(rf"\b(?:{'|'.join(['asm', *macros])})\b")
    every = [(match[1], match[2], _body(code, match.end())) for match in _FUNCTION.finditer(code)]
    count = len(assembling.findall(code))
    seen = sum(len(assembling.findall(body)) for _, _, body in every)
    if count != seen:
        raise ValueError(f"expected all inline assembly inside functions, found {count - seen} uses outside")
    names = [name for name, _, _ in every]
    return [
        f"{name}({_type(parameters)})" if names.count(name) > 1 and "<" not in name else name
        for name, parameters, body in every
        if assembling.search(body)
    ]


def _assembling_macros(source: str) -> list[str]:
    """Return the macros that expand to inline assembly."""
    macros = re.findall(r"^#\s*define (\w+)((?:.*\\\n)*.*)", source, flags=re.MULTILINE)
    assembling: list[str] = []
    for _ in macros:  # a macro may use a macro that is defined later
        for name, text in macros:
            if name not in assembling and re.search(rf"\b(?:{'|'.join(['asm', *assembling])})\b", text):
                assembling.append(name)
    return assembling


def _body(code: str, start: int) -> str:
    """Return the code from `start`, just after an opening brace, to its closing brace."""

    depth, at = 1, start
    while depth:
        depth += {"{": 1, "}": -1}.get(code[at], 0)
        at += 1
    return code[start:at]


def _type(parameters: str) -> str:
    first = parameters.split(",")[0].split()
    return " ".join(first[:-1])

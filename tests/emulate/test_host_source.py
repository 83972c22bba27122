"""Rewriting of shared-memory declarations for the host compiler; other source stays unchanged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunebench.emulate.host_source import NotEmulated, as_host_cxx

STATIC = "emulated::static_shared<tunebench_shared_0>()"
DYNAMIC = "(emulated::dynamic_shared);"


@pytest.mark.parametrize(
    ("declaration", "members", "names"),
    [
        ("__shared__ float s[64];", "float s[64];", ["s"]),
        ("__shared__ int flag;", "int flag;", ["flag"]),
        ("static __shared__ u64 full[ST], empty[ST];", "u64 full[ST], empty[ST];", ["full", "empty"]),
        ("__shared__ Vec<float, 4> a[2][N + 1], b;", "Vec<float, 4> a[2][N + 1], b;", ["a", "b"]),
        ("__shared__ alignas(16) T s[f(2, 3)][N];", "alignas(16) T s[f(2, 3)][N];", ["s"]),
        ("alignas(sizeof(T) * 4) __shared__ T s[N];", "alignas(sizeof(T) * 4) T s[N];", ["s"]),
        ("__shared__\n volatile\n float s[4];", "volatile float s[4];", ["s"]),
    ],
)
def test_static_declarations_are_rewritten(declaration: str, members: str, names: list[str]) -> None:
    references = "".join(f" auto& {name} = {STATIC}.{name};" for name in names)
    expected = f"struct tunebench_shared_0 {{ {members} }};{references}"
    assert as_host_cxx(declaration).rstrip("\n") == expected


@pytest.mark.parametrize(
    ("declaration", "kind"),
    [
        ("extern __shared__ float s[];", "float"),
        ("extern __shared__ __align__(1024) unsigned char s[];", "unsigned char"),
        ("extern alignas(16) __shared__ half_t s [ ] ;", "half_t"),
    ],
)
def test_dynamic_declarations_are_rewritten(declaration: str, kind: str) -> None:
    assert as_host_cxx(declaration) == f"{kind}*& s = reinterpret_cast<{kind}*&>{DYNAMIC}"


@pytest.mark.parametrize("declaration", ["__shared__ float (*s)[4];", "extern __shared__ float s[][4];"])
def test_other_forms_of_declarations_are_not_emulated(declaration: str) -> None:
    with pytest.raises(NotEmulated, match="expected `"):
        as_host_cxx(declaration)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "void __launch_bounds__(32 * W, 1)\nf(int (*a)(int), T b)\n{ g(); }",
            "void \nf(int (*a)(int), T b)\n{ emulated::launch_bounds(32 * W, 1); g(); }",
        ),
        (
            "void __launch_bounds__(Threads<C>::COUNT) f(ALL) {}",
            "void  f(ALL) { emulated::launch_bounds(Threads<C>::COUNT);}",
        ),
        ("void __launch_bounds__(64) f(int);", "void  f(int);"),
    ],
)
def test_launch_bounds_are_declared_at_the_start_of_the_kernel(source: str, expected: str) -> None:
    assert as_host_cxx(source) == expected


def test_launch_bounds_of_unfinished_source_are_not_emulated() -> None:
    with pytest.raises(NotEmulated, match="closing parenthesis"):
        as_host_cxx("void __launch_bounds__(64) f(int")


def test_every_declaration_gets_separate_struct() -> None:
    text = as_host_cxx("__shared__ int a; __shared__ int b;")
    assert "tunebench_shared_0" in text
    assert "tunebench_shared_1" in text


@given(
    st.lists(
        st.sampled_from(
            [
                "x;\n",
                "// __shared__ int c;\n",
                "/* a\nb */",
                '"// no"',
                "__shared__\nint s;\n",
                "void __launch_bounds__(64,\n1) f()\n{}\n",
                "void __launch_bounds__\n(64) f();\n",
            ]
        )
    )
)
def test_line_numbers_are_kept(parts: list[str]) -> None:
    source = "".join(parts)
    rewritten = as_host_cxx(source)
    assert rewritten.count("\n") == source.count("\n")
    assert rewritten.count('"// no"') == source.count('"// no"')
    assert "int c" not in rewritten

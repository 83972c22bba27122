"""Words of memory that change with Python objects: versions of dictionaries and types, and references.

CPython 3.11 numbers each change of a dictionary and of a type. A function in C compares all of them in one
call; it is compiled at its first use. Without a compiler or in another version of Python there is none.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["CachedValue", "Word", "Words", "are_supported", "hook_words", "instance_words", "list_words"]

_NAME = "tunebench_words"

_SOURCE = r"""
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

static void *word_of(PyObject *object, const char *kind) {
    if (!strcmp(kind, "tag") && PyDict_Check(object)) return &((PyDictObject *)object)->ma_version_tag;
    if (!strcmp(kind, "type")) return &object->ob_type;
    if (!strcmp(kind, "dict")) return _PyObject_GetDictPtr(object);
    if (!strcmp(kind, "version") && PyType_Check(object)) return &((PyTypeObject *)object)->tp_version_tag;
    if (!strcmp(kind, "cell") && PyCell_Check(object)) return &((PyCellObject *)object)->ob_ref;
    if (!strcmp(kind, "size") && PyList_Check(object)) return &((PyVarObject *)object)->ob_size;
    if (!strcmp(kind, "items") && PyList_Check(object)) return &((PyListObject *)object)->ob_item;
    if (!PyFunction_Check(object)) return NULL;
    if (!strcmp(kind, "code")) return &((PyFunctionObject *)object)->func_code;
    if (!strcmp(kind, "defaults")) return &((PyFunctionObject *)object)->func_defaults;
    if (!strcmp(kind, "kwdefaults")) return &((PyFunctionObject *)object)->func_kwdefaults;
    return NULL;
}

static PyObject *locate(PyObject *self, PyObject *args) {
    PyObject *object;
    const char *kind;
    if (!PyArg_ParseTuple(args, "Os", &object, &kind)) return NULL;
    void *word = word_of(object, kind);
    if (word == NULL && PyErr_Occurred()) return NULL;
    if (word == NULL) return PyErr_Format(PyExc_TypeError, "%s of %s", kind, Py_TYPE(object)->tp_name);
    return PyLong_FromVoidPtr(word);
}

static PyObject *load(PyObject *self, PyObject *args) {
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "K", &address)) return NULL;
    return PyLong_FromUnsignedLongLong(*(uint64_t *)(uintptr_t)address);
}

static PyObject *equal(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 1 || !PyBytes_CheckExact(args[0])) return PyErr_Format(PyExc_TypeError, "bytes are needed");
    const uint64_t *pair = (const uint64_t *)PyBytes_AS_STRING(args[0]);
    const uint64_t *end = pair + PyBytes_GET_SIZE(args[0]) / sizeof(uint64_t);
    for (const uint64_t *later = pair; later + 1 < end; later += 2) __builtin_prefetch((void *)*later);
    for (; pair + 1 < end; pair += 2)
        if (*(const uint64_t *)(uintptr_t)pair[0] != pair[1]) Py_RETURN_FALSE;
    Py_RETURN_TRUE;
}

static PyMethodDef methods[] = {
    {"locate", locate, METH_VARARGS, NULL},
    {"load", load, METH_VARARGS, NULL},
    {"equal", (PyCFunction)(void *)equal, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "tunebench_words", NULL, -1, methods};
PyMODINIT_FUNC PyInit_tunebench_words(void) { return PyModule_Create(&module); }
"""

Word = tuple[Any, str | int]
"""An object, and what of it is watched: a kind of the C code, or an offset in bytes."""


@functools.cache
def _library() -> Any:
    """Return the compiled functions, or None."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if sys.implementation.name != "cpython" or sys.version_info[:2] != (3, 11) or compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, f"{_NAME}.c"), Path(folder, f"{_NAME}.so")
        source.write_text(_SOURCE, encoding="utf-8")
        include = f"-I{sysconfig.get_paths()['include']}"
        command = [compiler, "-O2", "-fno-strict-aliasing", "-shared", "-fPIC", include]
        try:
            subprocess.run(
                [*command, str(source), "-o", str(library)], check=True, capture_output=True, timeout=60
            )
            loader = ExtensionFileLoader(_NAME, str(library))
            spec = importlib.util.spec_from_loader(_NAME, loader)
            assert spec is not None
            functions = importlib.util.module_from_spec(spec)
            loader.exec_module(functions)
        except (OSError, subprocess.SubprocessError, ImportError):
            return None
    return functions


def are_supported() -> bool:
    """Return whether words can be compared: in CPython 3.11, with a compiler of C and Python's headers."""
    return _library() is not None


_CHANGES, _USES = 4, 8
"""A value is noted as known so many times, and once more for so many uses."""


class Words:
    """The values of words, which are equal as long as nothing changed.

    Args:
        words: The words. Those of elements of a list follow those of its size and array.

    Raises:
        TypeError: An object has no such word, or its type has no version.
    """

    def __init__(self, words: Iterable[Word]) -> None:
        library = _library()
        self._equal = library.equal
        self._words: dict[int, Word] = {}
        self._referenced: list[Any] = []
        values: dict[int, int] = {}
        for owner, kind in words:
            address = id(owner) + kind if isinstance(kind, int) else library.locate(owner, kind)
            self._words[address] = owner, kind
            values[address] = library.load(address)
            if kind == "items":
                values.update({values[address] + 8 * index: id(item) for index, item in enumerate(owner)})
            elif kind == "version" and not values[address]:
                raise TypeError(f"{owner.__name__} has no version")
            self._referenced.append(_referenced(owner, kind))
        self._values = values
        self._pairs = b"".join(
            number.to_bytes(8, sys.byteorder) for pair in values.items() for number in pair
        )

    def hold(self) -> bool:
        """Return whether all words are as they were."""
        equal: bool = self._equal(self._pairs)
        return equal

    def changed(self) -> list[Word]:
        """Return the words that changed, without those of elements of lists."""
        load = _library().load
        return [word for address, word in self._words.items() if load(address) != self._values[address]]


class CachedValue:
    """A value that is known as long as words hold, such as the result of a check."""

    def __init__(self) -> None:
        self._value: Any = None
        self._words: Words | None = None
        self._changes = self._uses = 0

    def value(self) -> Any:
        """Return the value, or None if it is not known."""
        if self._words is None or not self._words.hold():
            return None
        self._uses += 1
        return self._value

    def learn(self, value: Any, words: Callable[[], Iterable[Word]]) -> None:
        """Set the value, known as long as these words hold that do not change again and again."""
        self._words, self._changes = None, self._changes + 1
        if self._changes <= _CHANGES + self._uses // _USES:
            self._value, self._words = value, Words(words())


def _referenced(owner: Any, kind: str | int) -> Any:
    """Return the object to which a word refers; it is kept, so that no other one gets its address."""
    if kind == "type":
        return type(owner)
    if kind == "dict":
        return owner.__dict__
    if kind == "cell":
        return owner.cell_contents
    if kind == "items":
        return list(owner)
    return getattr(owner, f"__{kind}__") if kind in ("code", "defaults", "kwdefaults") else None


def list_words(items: list[Any]) -> list[Word]:
    """Return the words of a list and of the references that it holds."""
    return [(items, "size"), (items, "items")]


def instance_words(owner: Any) -> list[Word]:
    """Return the words of an object's type and attributes."""
    return [(owner, "type"), (owner, "dict"), (owner.__dict__, "tag")]


@functools.cache
def _hook_offsets() -> tuple[int, ...]:
    """Return where a tensor refers to its hooks, by setting some.

    Raises:
        TypeError: It cannot be found.
    """
    library = _library()
    offsets = []
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        tensor = torch.nn.Parameter(torch.zeros(1))
        hooks: dict[int, Any] = {}
        setattr(tensor, name, hooks)
        words = range(16, Tensor.__basicsize__, 8)
        offsets += [offset for offset in words if library.load(id(tensor) + offset) == id(hooks)]
    if len(offsets) != 2:
        raise TypeError("a tensor does not refer to its hooks")
    return tuple(offsets)


def hook_words(tensor: Tensor) -> list[Word]:
    """Return the words of hooks of a tensor."""
    words: list[Word] = [(tensor, offset) for offset in _hook_offsets()]
    hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    return words + [(registered, "tag") for registered in hooks if registered is not None]

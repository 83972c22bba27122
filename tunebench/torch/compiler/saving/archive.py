"""The file of a saved model: an uncompressed zip of a description in JSON and of members with their hashes.

Loading such a file runs its machine code, and may unpickle Numba's part of it. So it is read under the rule
of the cache folder: only this user and root may be able to write it. The hashes find damage, not forgery.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunebench._foreign_file import interpreting
from tunebench._private_file import distrust, replaceable, write_private
from tunebench.errors import InputError

__all__ = ["FORMAT", "read_archive", "write_archive"]

FORMAT = 2
"""Version of the layout of the file."""

_DESCRIPTION = "description.json"


def write_archive(path: Path, description: Mapping[str, Any], members: Mapping[str, bytes]) -> str:
    """Write a file, replacing one of the same name at once, and return its digest.

    Args:
        path: The file.
        description: Plain data.
        members: Contents by name.

    Returns:
        SHA-256 of the description, which has the hashes of all members.

    Raises:
        InputError: if the file cannot be written.
    """
    path = replaceable(path)
    hashes = {name: hashlib.sha256(content).hexdigest() for name, content in members.items()}
    text = json.dumps({**description, "format": FORMAT, "sha256": hashes}, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(_DESCRIPTION, json.dumps({"digest": digest, "description": text}))
        for name, member in members.items():
            archive.writestr(name, member)
    try:
        write_private(path, content.getvalue())
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error
    return digest


def read_archive(path: Path, digest: str | None = None) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Return the description and the members of a file.

    Args:
        path: The file.
        digest: The expected digest; any by default.

    Raises:
        InputError: if the file cannot be read, others may write it, it was altered, or has another digest.
    """
    content = _trusted_bytes(path)
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise InputError(f"{path} is not a saved model, or it is damaged: {error}") from error
    with interpreting(f"{path} is not a saved model"):
        outer = json.loads(members.pop(_DESCRIPTION))
        text, stated = outer["description"], outer["digest"]
        if hashlib.sha256(text.encode()).hexdigest() != stated:
            raise InputError(f"{path} was altered since it was saved: its description has another hash")
        if digest is not None and digest != stated:
            raise InputError(f"{path} has the digest {stated}, expected {digest}: it is another file")
        description: dict[str, Any] = json.loads(text)
        if description["format"] != FORMAT:
            raise InputError(
                f"{path} has format {description['format']}, this version reads {FORMAT}: "
                "save the model again"
            )
        hashes = description["sha256"]
        altered = [
            name
            for name in sorted({*hashes, *members})
            if name not in members or hashlib.sha256(members[name]).hexdigest() != hashes.get(name)
        ]
    if altered:
        raise InputError(f"{path} was altered since it was saved: {', '.join(altered)}")
    return description, members


def _trusted_bytes(path: Path) -> bytes:
    """Return the contents of a file whose machine code may run.

    Raises:
        InputError: if it cannot be read, or others may write it.
    """
    try:
        with path.open("rb") as file:
            reason = distrust(os.fstat(file.fileno()))
            content = file.read()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    if reason is not None:
        raise InputError(
            f"{path} {reason}, and loading it runs its machine code: if you trust it, make a copy of your "
            "own that nobody else may write"
        )
    return content

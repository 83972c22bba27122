"""On-disk cache of binaries, keyed by exactly what reached the compiler; safe for concurrent processes.

An entry is a line of JSON followed by the payload. It is written to a temporary file and renamed, so that a
reader never sees a partial entry. An entry that is damaged, or that another user may write, counts as absent.
Reading never unpickles.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tunebench._private_file import create_folder, read_private
from tunebench.binary.compiled import Binary
from tunebench.outcome import Resources

__all__ = ["BinaryCache", "binary_key"]

_FORMAT = 2


def binary_key(*parts: str) -> str:
    """Return the cache key of everything that reaches a compiler: source, flags, target, version."""
    return hashlib.sha256("\0".join((str(_FORMAT), *parts)).encode()).hexdigest()[:32]


class BinaryCache:
    """Binaries on disk.

    Args:
        folder: Folder of the entries; created at the first write.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get_or_compile(self, key: str, compile_it: Callable[[], Binary]) -> Binary:
        """Return the binary stored under `key`, or compile and store it.

        If the folder cannot be written, the binary is returned and not stored.

        Args:
            key: From `binary_key`.
            compile_it: Called if there is no intact entry.

        Raises:
            EnvironmentFault: if another user may write the folder.
        """
        binary = self.get(key)
        if binary is None:
            binary = compile_it()
            self.put(binary)
        return binary

    def get(self, key: str) -> Binary | None:
        """Return a stored binary, or None if it is missing or damaged, or if another user may write it."""
        try:
            header, _, payload = read_private(self._path(key)).partition(b"\n")
            fields: dict[str, Any] = json.loads(header)
            digest = fields.pop("payload_sha256")
            resources = Resources(**fields.pop("resources"))
            entries, notes = tuple(fields.pop("entries")), tuple(fields.pop("notes"))
            fields["omitted"] = tuple(fields.get("omitted", ()))
            binary = Binary(**fields, entries=entries, resources=resources, notes=notes, payload=payload)
        except (OSError, ValueError, TypeError, KeyError):
            return None
        intact = binary.key == key and hashlib.sha256(payload).hexdigest() == digest
        return binary if intact else None

    def put(self, binary: Binary) -> None:
        """Store a binary; a full or read-only disk is ignored.

        Raises:
            EnvironmentFault: if another user may write the folder.
        """
        fields = {f.name: getattr(binary, f.name) for f in dataclasses.fields(binary) if f.name != "payload"}
        fields["resources"] = dataclasses.asdict(binary.resources)
        fields["payload_sha256"] = hashlib.sha256(binary.payload).hexdigest()
        path = self._path(binary.key)
        temporary = None
        try:
            create_folder(self._folder, path.parent.name)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                temporary = file.name
                file.write(json.dumps(fields).encode() + b"\n" + binary.payload)
            os.replace(temporary, path)  # noqa: PTH105 - the one call that renames atomically over a file
        except OSError:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / key

"""List the licence of every package that tunebench needs: `python -m tests.packaging.licences [EXTRA ...]`.

Packages that are not installed here are listed without a licence, and the exit status is then 1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

__all__ = ["Licence", "closure", "licence_of", "main", "required"]

Licence = tuple[str, str, str]
"""Name of a package, its version, and its licence; empty texts if it is not installed."""


def required(package: str, extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the packages that a package requires on this machine, and the extras of each.

    Args:
        package: Name of the package.
        extras: Its extras that are wanted.
    """
    for text in metadata.requires(package) or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield canonicalize_name(requirement.name), frozenset(requirement.extras)


def licence_of(package: str) -> Licence:
    """Return version and licence of a package, by its SPDX expression, its classifiers or its text.

    Args:
        package: Name of the package.
    """
    try:
        about = metadata.metadata(package)
    except metadata.PackageNotFoundError:
        return package, "", ""
    classifiers = [
        text.rpartition(" :: ")[2]
        for text in about.get_all("Classifier") or ()
        if text.startswith("License ::")
    ]
    expression, *_ = about.get_all("License-Expression") or [""]
    text, *_ = about.get_all("License") or [""]
    stated = expression or ", ".join(classifiers) or text.strip().partition("\n")[0]
    return package, about["Version"], stated


def closure(extras: frozenset[str]) -> list[Licence]:
    """Return the licences of all packages that tunebench needs, directly or not.

    Args:
        extras: Extras of tunebench.
    """
    waiting, known = [("tunebench", extras)], set()
    while waiting:
        request = waiting.pop()
        if request not in known:
            known.add(request)
            if licence_of(request[0])[1]:
                waiting += required(*request)
    return [licence_of(package) for package in sorted({package for package, _ in known})]


def main(arguments: list[str]) -> int:
    """Print the licences, and return the exit status."""
    every = metadata.metadata("tunebench").get_all("Provides-Extra") or []
    licences = closure(frozenset(arguments or every))
    width = max(len(f"{name} {version}") for name, version, _ in licences)
    for name, version, licence in licences:
        stated = licence or ("not stated" if version else "not installed")
        sys.stdout.write(f"{f'{name} {version}':<{width}}  {stated}\n")
    return int(not all(version and licence for _, version, licence in licences))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

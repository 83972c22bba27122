"""`python -m tunebench` is `tunebench`."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line; Ctrl-C is no error, also while it is imported (`tunebench._start`)."""
    try:
        from tunebench import cli

        cli.main()
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()

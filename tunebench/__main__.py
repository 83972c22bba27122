"""`python -m tunebench` is `tunebench`."""

from tunebench.cli import main

if __name__ == "__main__":
    main()

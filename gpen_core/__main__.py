"""`python -m gpen_core` is `gpen-core`."""

from gpen_core.cli import main

if __name__ == "__main__":
    main()

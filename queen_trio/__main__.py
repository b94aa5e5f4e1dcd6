"""`python -m queen_trio`: the same as `queen-trio`."""

from __future__ import annotations

from queen_trio.cli import main

if __name__ == "__main__":
    main(prog_name="queen-trio")

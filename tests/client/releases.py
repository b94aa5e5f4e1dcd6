"""The releases of the public client under test, and how one of them becomes `import queen`."""

from __future__ import annotations

import importlib
import sys
import sysconfig
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

# What pyproject.toml pins; the older ones live in directories of their own (see the Makefile).
CURRENT = "2.6.0"
RELEASES = ("0.15.0", "1.0.6", "1.3.0", CURRENT)
# From 1.2 on the client leaves what the caller didn't set to the broker ("autopilot").
AUTOPILOT_RELEASES = ("1.3.0", CURRENT)

DIRECTORY = Path(sys.prefix) / "clients"


def directory(release: str) -> Path:
    """Return the directory to import this release from; raises when it isn't installed there."""
    if release == CURRENT:
        path = Path(sysconfig.get_path("purelib"))
        remedy = "pip install --require-hashes -r requirements-dev.txt"
    else:
        path = DIRECTORY / release
        remedy = (
            f"pip install --no-deps --require-hashes --target {path} "
            f"-r requirements-clients/{release}.txt"
        )
    if not (path / f"queen_mq-{release}.dist-info").is_dir():
        raise RuntimeError(f"queen-mq {release} is not installed in {path}. Run: {remedy}")
    return path


@contextmanager
def imported(release: str) -> Iterator[ModuleType]:
    """Make `queen` mean this release while the block runs.

    The block must span every use of the client: it imports parts of itself only when called.
    """
    path = str(directory(release))
    outside = _forget()
    sys.path.insert(0, path)
    try:
        yield importlib.import_module("queen")
    finally:
        sys.path.remove(path)
        _forget()
        sys.modules.update(outside)


def _forget() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name == "queen" or name.startswith("queen.")]
    return {name: sys.modules.pop(name) for name in names}

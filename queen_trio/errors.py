"""Errors by who caused them: the client, the database, the operator, or ourselves.

A handler turns a `ClientError` into a 4xx, a `DatabaseUnavailable` into a spool record or a 503;
anything else is our own fault, is logged with its traceback and answered with a 500.
"""

from __future__ import annotations

from typing import Final

# Exit codes that more than one kind of process ends with; cli.py lists them all.
EXIT_MISCONFIGURED: Final = 2
EXIT_SECOND_SIGNAL: Final = 130


class QueenError(Exception):
    """Whatever queen-trio raises on purpose."""


class ConfigError(QueenError):
    """The environment asks for something impossible; `faults` holds one sentence per fault."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


class ClientError(QueenError):
    """The request can't be served as it stands: answered with `status` and the message.

    The message names the field and the value. `code` is the machine-readable twin, where a client
    is known to look at one.
    """

    def __init__(self, message: str, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class DatabaseError(QueenError):
    """A statement failed; `sqlstate` is None where the server said nothing (a lost connection)."""

    def __init__(self, message: str, *, sqlstate: str | None = None) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate


class DatabaseUnavailable(DatabaseError):
    """A transient failure: the same statement may succeed later (spec 4, "Spool"; spec 8.16)."""


class SchemaError(QueenError):
    """The schema in the database can't serve this broker; ends the boot with exit 1."""


class PoolingError(QueenError):
    """Connections to PostgreSQL aren't sessions of their own; ends the boot with exit 1."""

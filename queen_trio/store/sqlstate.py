"""Which SQLSTATEs are worth a second try, and which will fail the same way for ever."""

from __future__ import annotations

import re
from typing import Final

# Connection exceptions, insufficient resources, operator intervention, system errors (spec 4).
TRANSIENT_CLASSES: Final = frozenset({"08", "53", "57", "58"})

TRANSIENT_STATES: Final = frozenset(
    {
        "25006",  # read_only_sql_transaction: a demoted primary (spec 8.16)
        "26000",  # invalid_sql_statement_name: the session lost a prepared statement, not the data
        "40001",  # serialization_failure
        "40P01",  # deadlock_detected
        "55P03",  # lock_not_available
    }
)

READ_ONLY_TRANSACTION: Final = "25006"
LOST_PREPARED_STATEMENT: Final = "26000"
TOO_MANY_CONNECTIONS: Final = "53300"
# Ours, raised by push_v1: a segment is encrypted, or not, against its queue's option.
ENCRYPTION_DIFFERS: Final = "QT002"

# libpq reports a refused start-up as text only, so this is all there is to go by. A server with a
# translated lc_messages isn't recognised and is treated as unreachable for a moment: the pool then
# backs off instead of capping itself.
_TOO_MANY_CONNECTIONS_TEXT: Final = re.compile(
    r"too many (clients|connections)|connection slots are reserved|no more connections allowed"
)


def is_transient(sqlstate: str | None) -> bool:
    """Say whether the same statement may succeed later (spec 4, "Spool"; spec 8.16).

    None means that the server said nothing: the connection was lost, so the outcome is unknown.
    """
    return sqlstate is None or sqlstate in TRANSIENT_STATES or sqlstate[:2] in TRANSIENT_CLASSES


def sqlstate_of_refusal(message: str) -> str | None:
    """Return 53300 when a failed connection attempt says that the server is full, else None."""
    return TOO_MANY_CONNECTIONS if _TOO_MANY_CONNECTIONS_TEXT.search(message) else None

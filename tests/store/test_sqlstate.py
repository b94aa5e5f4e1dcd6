"""Which errors are worth a second try: the table of spec 4 and spec 8.16."""

from __future__ import annotations

import pytest

from queen_trio.store.sqlstate import TOO_MANY_CONNECTIONS, is_transient, sqlstate_of_refusal


@pytest.mark.parametrize(
    "sqlstate",
    [
        None,  # the server said nothing
        "08006",  # connection_failure
        "25006",  # read_only_sql_transaction
        "26000",  # invalid_sql_statement_name
        "40001",  # serialization_failure
        "40P01",  # deadlock_detected
        "53100",  # disk_full
        "53300",  # too_many_connections
        "55P03",  # lock_not_available
        "57014",  # query_canceled: our deadline
        "57P01",  # admin_shutdown
        "57P03",  # cannot_connect_now
        "58030",  # io_error
    ],
)
def test_transient(sqlstate: str | None) -> None:
    assert is_transient(sqlstate)


@pytest.mark.parametrize(
    "sqlstate",
    [
        "0A000",  # feature_not_supported
        "22021",  # character_not_in_repertoire
        "23505",  # unique_violation
        "25001",  # active_sql_transaction: only 25006 of its class
        "28P01",  # invalid_password
        "40002",  # transaction_integrity_constraint_violation
        "42P01",  # undefined_table
        "55006",  # object_in_use: only 55P03 of its class
        "P0001",  # raise_exception
        "XX000",  # internal_error
    ],
)
def test_permanent(sqlstate: str) -> None:
    assert not is_transient(sqlstate)


@pytest.mark.parametrize(
    ("message", "sqlstate"),
    [
        ("FATAL:  sorry, too many clients already", TOO_MANY_CONNECTIONS),
        ('FATAL:  too many connections for role "app"', TOO_MANY_CONNECTIONS),
        ("FATAL:  remaining connection slots are reserved for roles with …", TOO_MANY_CONNECTIONS),
        ("ERROR:  no more connections allowed (max_client_conn)", TOO_MANY_CONNECTIONS),
        ("FATAL:  the database system is starting up", None),
        ("connection refused", None),
    ],
)
def test_refusal(message: str, sqlstate: str | None) -> None:
    assert sqlstate_of_refusal(f"connection failed: {message}") == sqlstate

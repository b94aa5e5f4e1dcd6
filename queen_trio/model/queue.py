"""The options of a queue: names, types and bounds (spec 2, "Queues")."""

from __future__ import annotations

from typing import Any, Final

from queen_trio.errors import ClientError

INT32_MAX: Final = 2**31 - 1

INTEGER_OPTIONS: Final = {
    "leaseTime": "lease_time",
    "retryLimit": "retry_limit",
    "delayedProcessing": "delayed_processing",
    "windowBuffer": "window_buffer",
    "minPopWaitTime": "min_pop_wait_time",
    "retentionSeconds": "retention_seconds",
    "completedRetentionSeconds": "completed_retention_seconds",
    "maxWaitTimeSeconds": "max_wait_time_seconds",
    "dedupWindowSeconds": "dedup_window_seconds",
    "priority": "priority",
    "ttl": "ttl",
    "maxSize": "max_size",
    "retryDelay": "retry_delay",
}
BOOLEAN_OPTIONS: Final = {
    "deadLetterQueue": "dead_letter_queue",
    "dlqAfterMaxRetries": "dlq_after_max_retries",
    "retentionEnabled": "retention_enabled",
    "encryptionEnabled": "encryption_enabled",
}
COLUMNS: Final = INTEGER_OPTIONS | BOOLEAN_OPTIONS


def columns_from_options(options: dict[str, Any]) -> dict[str, int | bool | None]:
    """Return the given options by column; None stays, it means the default.

    Unknown options are ignored (spec 2). Raises `ClientError` naming an option of the wrong type
    or out of range. A lease that lasts no time is refused too: nobody could ack in it.
    """
    columns: dict[str, int | bool | None] = {}
    for option, value in options.items():
        column = COLUMNS.get(option)
        if column is None:
            continue
        if value is not None:
            if option in BOOLEAN_OPTIONS:
                if not isinstance(value, bool):
                    raise ClientError(f"{option}={value!r} is not a boolean")
            elif isinstance(value, bool) or not isinstance(value, int):
                raise ClientError(f"{option}={value!r} is not an integer")
            elif not (least := 1 if option == "leaseTime" else 0) <= value <= INT32_MAX:
                raise ClientError(f"{option}={value} is out of range ({least} to {INT32_MAX})")
        columns[column] = value
    return columns


def options_from_row(row: dict[str, Any]) -> dict[str, int | bool]:
    """Return the options of a queue's row under their wire names."""
    return {option: row[column] for option, column in COLUMNS.items()}

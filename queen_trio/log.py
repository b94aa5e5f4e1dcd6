"""Structured logging, configured once: text for people, or JSON lines for machines, on stderr.

Every module takes `log = structlog.get_logger()` and logs an event with key-value pairs; the event
is the literal first part of the line in both formats (spec 8.21). What the standard library's
logging carries (hypercorn, asyncio-born packages) comes out in the same format.
"""

from __future__ import annotations

import logging
import sys
from enum import Enum
from typing import TYPE_CHECKING, Any, TextIO

import structlog

if TYPE_CHECKING:
    from structlog.typing import Processor


class LogLevel(Enum):
    """Severity, least first."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"

    @property
    def number(self) -> int:
        """The level's number in the standard library."""
        return logging.getLevelNamesMapping()[self.name]


class UnfailingStream:
    """A text stream whose failures stay its own: a full disk under stderr must not fail a push."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream  # None where the process started without a stderr

    def write(self, text: str) -> None:
        """Write `text`, or drop it."""
        if self._stream is not None:
            try:
                self._stream.write(text)
                self._stream.flush()
            except (OSError, ValueError):  # ValueError: the stream is closed
                pass

    def flush(self) -> None:
        """Do nothing: `write` has flushed."""


def configure(*, level: LogLevel, json: bool, stream: TextIO | None = None) -> None:
    """Set up structlog and the standard library's logging; call once, before the first event.

    `stream` is stderr unless a test gives its own. Loggers used after this call are cached, so a
    second call reaches only those that haven't logged yet.
    """
    sink: Any = UnfailingStream(sys.stderr if stream is None else stream)
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    render: list[Processor]
    if json:
        # Tracebacks as one string: the structured ones would carry local variables, and secrets.
        render = [
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=repr),
        ]
    else:
        render = [
            structlog.dev.ConsoleRenderer(
                colors=False,
                pad_event_to=0,
                pad_level=False,
                sort_keys=False,
                exception_formatter=structlog.dev.plain_traceback,
            )
        ]
    structlog.configure(
        processors=[*shared, *render],
        wrapper_class=structlog.make_filtering_bound_logger(level.number),
        logger_factory=structlog.WriteLoggerFactory(file=sink),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sink)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    logging.basicConfig(handlers=[handler], level=level.number, force=True)

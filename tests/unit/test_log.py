"""Logging: literal events in both formats, and a sink that never fails its caller."""

from __future__ import annotations

import io
import json
import logging
import re

import pytest
import structlog

from queen_trio.log import LogLevel, configure

pytestmark = pytest.mark.usefixtures("logging_as_before")


def lines(*, json: bool, level: LogLevel = LogLevel.INFO) -> io.StringIO:
    stream = io.StringIO()
    configure(level=level, json=json, stream=stream)
    return stream


def test_text_has_the_event_literally_before_its_values() -> None:
    stream = lines(json=False)
    structlog.get_logger().info("config: sync", auth="off", peers=0)
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z \[info\] config: sync auth=off peers=0\n",
        stream.getvalue(),
    )


def test_json_has_the_event_literally() -> None:
    stream = lines(json=True)
    structlog.get_logger().warning("TCP mesh bind failed", port=6633, path=object)
    line = json.loads(stream.getvalue())
    assert line["event"] == "TCP mesh bind failed"
    assert line["level"] == "warning"
    assert line["port"] == 6633
    assert line["path"] == repr(object)
    assert line["timestamp"].endswith("Z")


@pytest.mark.parametrize("as_json", [False, True])
def test_a_value_cannot_forge_a_line(as_json: bool) -> None:
    stream = lines(json=as_json)
    structlog.get_logger().info("push", queue="a\n2026-01-01 [info] forged")
    assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize("as_json", [False, True])
def test_lone_surrogates_are_written(as_json: bool) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace")
    configure(level=LogLevel.INFO, json=as_json, stream=stream)
    structlog.get_logger().info("push", queue="\udc80")
    assert b"udc80" in raw.getvalue()


def test_the_level_hides_what_is_less_severe() -> None:
    stream = lines(json=True, level=LogLevel.WARNING)
    log = structlog.get_logger()
    log.info("no")
    log.warning("yes")
    logging.getLogger("hypercorn.error").info("no")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["yes"]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_traceback_carries_no_local_variable(as_json: bool) -> None:
    stream = lines(json=as_json)
    secret = "".join(["hidden", "-", "password"])
    try:
        raise ValueError(f"{len(secret)} chars")
    except ValueError:
        structlog.get_logger().exception("job failed", job="retention")
    assert "ValueError: 15 chars" in stream.getvalue()
    assert secret not in stream.getvalue()


@pytest.mark.parametrize("as_json", [False, True])
def test_the_standard_library_logs_in_the_same_format(as_json: bool) -> None:
    stream = lines(json=as_json)
    logging.getLogger("hypercorn.error").warning("Running on %s", "http://127.0.0.1")
    structlog.get_logger().warning("Running on http://127.0.0.1")
    stamp = r"\d{4}-\d\d-\d\dT[\d:.]+Z"
    first, second = re.sub(stamp, "", stream.getvalue()).splitlines()
    assert first == second


def test_context_reaches_every_line() -> None:
    stream = lines(json=True)
    with structlog.contextvars.bound_contextvars(request="r-1"):
        structlog.get_logger().info("push")
    assert json.loads(stream.getvalue())["request"] == "r-1"


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")


def test_a_stream_that_fails_fails_nobody() -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (FullDisk(), closed):
        configure(level=LogLevel.INFO, json=False, stream=stream)
        structlog.get_logger().info("push")
        logging.getLogger("hypercorn.error").warning("x")


def test_a_process_without_stderr_logs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    configure(level=LogLevel.INFO, json=False)
    structlog.get_logger().info("push")

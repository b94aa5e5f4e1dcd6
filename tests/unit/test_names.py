"""Names: what PostgreSQL can hold, and what a refusal says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from queen_trio.errors import ClientError
from queen_trio.model.names import (
    MAX_NAME_BYTES,
    MAX_TRANSACTION_ID_BYTES,
    check_name,
    check_optional_name,
    shorten,
)


@pytest.mark.parametrize(
    "name", ["q", " ", "orders.created", "ü", "'", "\n", "x" * 512, "😀" * 128]
)
def test_fine(name: str) -> None:
    assert check_name(name, "queue") == name


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("", "queue must not be empty"),
        ("a\0b", "queue must not contain U\\+0000: 'a"),
        ("x" * 513, "queue is longer than 512 bytes: 'xxx"),
        ("ü" * 257, "queue is longer than 512 bytes"),
        ("😀" * 129, "queue is longer than 512 bytes"),
        ("\0" * 600, "queue is longer than 512 bytes"),
    ],
)
def test_refused(name: str, complaint: str) -> None:
    with pytest.raises(ClientError, match=complaint) as caught:
        check_name(name, "queue")
    assert caught.value.status == 400
    assert len(str(caught.value)) < 400


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=600))
def test_the_limit_is_in_bytes(name: str) -> None:
    fits = 0 < len(name.encode()) <= MAX_NAME_BYTES and "\0" not in name
    try:
        assert check_name(name, "queue") == name
    except ClientError:
        assert not fits
    else:
        assert fits


def test_a_transaction_id_may_be_longer() -> None:
    check_name("x" * 2048, "transactionId", MAX_TRANSACTION_ID_BYTES)
    with pytest.raises(ClientError, match="2048"):
        check_name("x" * 2049, "transactionId", MAX_TRANSACTION_ID_BYTES)


def test_a_lone_surrogate_is_measured_not_raised() -> None:
    with pytest.raises(ClientError, match="longer"):
        check_name("\ud800" * 200, "queue")


def test_an_optional_name() -> None:
    assert check_optional_name(None, "task") is None
    assert check_optional_name("t", "task") == "t"
    with pytest.raises(ClientError, match="task must not be empty"):
        check_optional_name("", "task")


def test_shorten() -> None:
    assert shorten("x" * 80) == "x" * 80
    assert shorten("x" * 81) == "x" * 80 + "…"

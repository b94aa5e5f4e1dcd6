"""An ack body is refused with a ClientError, or every ack in it can be put into a statement."""

from __future__ import annotations

import json
from uuid import UUID

from hypothesis import strategies as st

from queen_trio.errors import ClientError
from queen_trio.http import ack
from queen_trio.http.codec import decode_untrusted

from .push_body import LEAVES, VALUES

IDS = st.one_of(LEAVES, st.uuids().map(str))
STATUSES = st.one_of(LEAVES, st.sampled_from(["completed", "failed", "dlq", "retry", "x"]))
ACKS = st.fixed_dictionaries(
    {"transactionId": st.text(max_size=6), "partitionId": IDS},
    optional={"status": STATUSES, "leaseId": IDS, "consumerGroup": LEAVES, "error": LEAVES},
)
INPUTS = st.one_of(
    ACKS,
    st.fixed_dictionaries({"acknowledgments": st.lists(st.one_of(ACKS, VALUES), max_size=3)}),
    VALUES,
).map(lambda value: json.dumps(value).encode())


def check(data: bytes) -> None:
    try:
        body = decode_untrusted(ack._batch, data)
        items = len(body.acknowledgments)
        acks = ack._acks(body.acknowledgments, body.consumer_group, "acknowledgments[{}].")
    except ClientError:
        try:
            acks = ack._acks([decode_untrusted(ack._single, data)], None, "")
            items = 1
        except ClientError as error:
            assert 400 <= error.status < 500
            str(error).encode()
            return
    assert sum(len(one.transaction_ids) for one in acks) == items
    for one in acks:
        for text in (*one.transaction_ids, one.group, one.lease_id):
            assert text is None or b"\0" not in text.encode()
        assert one.error is None or one.error.encode() is not None
        assert one.partition_id is None or isinstance(one.partition_id, UUID)

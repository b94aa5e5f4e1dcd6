"""A push body is refused with a ClientError, or its payloads are the JSON that was sent, verbatim.

Whatever is accepted can be stored: UTF-8, names without NUL, no lone surrogates.
"""

from __future__ import annotations

import json

from hypothesis import strategies as st

from queen_trio.errors import ClientError
from queen_trio.http import push
from queen_trio.http.codec import decode_untrusted
from queen_trio.model.message import check_item

KEYS = ["items", "queue", "payload", "partition", "transactionId", "traceId", "x"]
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=6),
    st.sampled_from(["\0", "\ud800", "q"]),
)  # fmt: skip
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    ),
    max_leaves=8,
)
ITEMS = st.fixed_dictionaries(
    {"queue": st.text(min_size=1, max_size=4), "payload": VALUES},
    optional={"partition": LEAVES, "transactionId": LEAVES, "traceId": LEAVES},
)
INPUTS = st.one_of(
    st.fixed_dictionaries({"items": st.lists(st.one_of(ITEMS, VALUES), max_size=3)}),
    VALUES,
).map(lambda value: json.dumps(value).encode())


def check(data: bytes) -> None:
    try:
        items = decode_untrusted(push._decoder, data).items
        for index, item in enumerate(items):
            check_item(item, index)
    except ClientError as error:
        assert 400 <= error.status < 500
        str(error).encode()
        return
    # Python's own parser as the judge; numbers stay text, as it limits their digits.
    sent = json.loads(data, parse_int=str, parse_float=str)["items"]
    assert len(items) == len(sent)
    for item, twin in zip(items, sent, strict=True):
        payload = bytes(item.payload)
        assert payload in data
        assert json.loads(payload, parse_int=str, parse_float=str) == twin["payload"]
        for name in (item.queue, item.partition, item.transaction_id):
            assert name is None or b"\0" not in name.encode()

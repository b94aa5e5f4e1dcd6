"""A consumer of a group: acks most, nacks, forgets and extends some, pushes on in transactions."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import httpx
import trio
from attrs import define

from tests.chaos.history import (
    Ack,
    Claim,
    Extension,
    Outcome,
    Place,
    Push,
    Said,
    Status,
    Transaction,
    Verb,
)
from tests.chaos.operators import Landmark
from tests.chaos.places import ONCE, PARTITIONS, QUEUE_MODE, QUEUES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from tests.chaos.load import Load
    from tests.http.api import Json

LEASES = (2, 3)  # seconds
# A pop's beginning is the earliest moment of its claim: long polls would tell little about leases.
POP_MS = 500
RETRY_SECONDS = 0.05
ATTEMPTS = 5
LATE = 0.25  # how often a transaction comes when its lease has run out, or nearly so
LEASE_REQUIRED = 0.5  # how often it says that its lease has to be live
# What lets a consumer's next deed differ from the last one's.
DEEDS = {
    "all": 62,
    "two steps": 8,
    "transaction": 8,
    "retry": 5,
    "failed": 5,
    "dlq": 2,
    "forget": 5,
    "extend": 5,
}
# What an attempt of a transaction tells of each of its pushes.
STATUSES = {
    Outcome.COMMITTED: Status.QUEUED,
    Outcome.REPEATED: Status.DUPLICATE,
    Outcome.REFUSED: Status.FAILED,
    Outcome.UNKNOWN: Status.UNKNOWN,
}


@define(eq=False)
class Consumer:
    """One of a group; what it doesn't settle comes back when its lease has run out."""

    load: Load
    group: str
    random: Random

    async def run(self) -> None:
        """Pop and settle until the load is finished."""
        while not self.load.finished:
            for claim, partition_id in await self._pop():
                await self._settle(claim, partition_id)

    async def _pop(self) -> list[tuple[Claim, str]]:
        random, calm = self.random, self.load.calmed
        queue = random.choice((*QUEUES, ONCE))
        lease_seconds = random.choice(LEASES)
        params: Json = {
            "wait": "true",
            "timeout": POP_MS,
            "batch": 500 if calm else random.choice((1, 5, 20)),
            "partitions": 0 if calm else random.choice((1, 1, 3)),
            "leaseSeconds": lease_seconds,
        }
        if self.group != QUEUE_MODE:
            params |= {"consumerGroup": self.group, "subscriptionMode": "all"}
        client = random.choice(self.load.clients)
        sent = trio.current_time()
        try:
            response = await client.get(f"/api/v1/pop/queue/{queue}", params=params)
        except httpx.TransportError:
            await trio.sleep(RETRY_SECONDS)
            return []
        if response.status_code == 204:
            return []
        if response.status_code != 200:
            assert response.status_code in (500, 503), response.text
            await trio.sleep(RETRY_SECONDS)
            return []
        received = trio.current_time()
        parts: dict[str, list[Json]] = defaultdict(list)
        for message in response.json()["messages"]:
            parts[message["partition"]].append(message)
        claims = [
            Claim(
                self.group,
                Place(queue, partition),
                messages[0]["leaseId"],
                sent,
                received,
                lease_seconds,
                messages[0]["deliveryAttempt"],
                tuple(message["transactionId"] for message in messages),
                tuple(message["id"] for message in messages),
            )
            for partition, messages in parts.items()
        ]
        self.load.history.claims += claims
        for claim in claims:
            last = parts[claim.place.partition][-1]
            self.load.landmarks.append(
                Landmark(self.group, claim.place, last["transactionId"], last["createdAt"])
            )
        return [(claim, parts[claim.place.partition][0]["partitionId"]) for claim in claims]

    async def _settle(self, claim: Claim, partition_id: str) -> None:
        ids, random = claim.transaction_ids, self.random
        [deed] = random.choices(list(DEEDS), list(DEEDS.values()))
        at = random.randrange(len(ids))
        if self.load.calmed or deed == "all":
            await self._ack(claim, partition_id, ids, Verb.COMPLETED)
        elif deed == "two steps":
            await self._ack(claim, partition_id, ids[: at + 1], Verb.COMPLETED)
            await trio.sleep(random.uniform(0, 0.5))
            await self._ack(claim, partition_id, ids[at + 1 :], Verb.COMPLETED)
        elif deed == "extend":
            await self._extend(claim)
            await trio.sleep(random.uniform(0, claim.lease_seconds))
            await self._ack(claim, partition_id, ids, Verb.COMPLETED)
        elif deed == "transaction":
            last = random.choice((Verb.COMPLETED, Verb.COMPLETED, Verb.DLQ))
            await self._transact(claim, partition_id, ids[: at + 1], last)
        elif deed != "forget":
            await self._ack(claim, partition_id, ids[: at + 1], Verb(deed))

    async def _ack(self, claim: Claim, partition_id: str, ids: Sequence[str], last: Verb) -> None:
        """Say `completed` of all but the last, and of that one `last`, until somebody answers."""
        if not ids:
            return
        verbs = _verbs(ids, last)
        body: Json = {"acknowledgments": _items(claim, partition_id, ids, verbs)}
        for _ in range(ATTEMPTS):
            sent, results = await self.load.post(self.random, "/api/v1/ack/batch", body)
            self._note(claim, sent, _said(ids, verbs, results))
            if results is not None:
                return
            await trio.sleep(RETRY_SECONDS)

    def _note(
        self, claim: Claim, sent: float, said: list[Said], transaction: int | None = None
    ) -> None:
        answered = None if said[0].success is None else trio.current_time()
        self.load.history.acks.append(
            Ack(claim.group, claim.place, claim.lease, sent, answered, tuple(said), transaction)
        )

    async def _transact(
        self, claim: Claim, partition_id: str, ids: Sequence[str], last: Verb
    ) -> None:
        """Ack, and push a message to each of two queues, all or nothing, until it is decided."""
        if self.random.random() < LATE:
            await trio.sleep(claim.lease_seconds * self.random.uniform(0.8, 1.2))
        number = next(self.load.numbers)
        verbs = _verbs(ids, last)
        pushed = tuple(
            (Place(queue, self.random.choice(PARTITIONS)), f"x{number}-{queue}") for queue in QUEUES
        )
        operations = [{"type": "ack", **item} for item in _items(claim, partition_id, ids, verbs)]
        operations += [
            {
                "type": "push",
                "queue": place.queue,
                "partition": place.partition,
                "transactionId": transaction_id,
                "payload": transaction_id,
            }
            for place, transaction_id in pushed
        ]
        body: Json = {"operations": operations}
        if self.random.random() < LEASE_REQUIRED:
            body["requiredLeases"] = [claim.lease]
        began = float("inf")
        for _ in range(ATTEMPTS):
            sent, answer = await self.load.post(self.random, "/api/v1/transaction", body)
            outcome = _outcome(answer)
            answered = None if answer is None else trio.current_time()
            self.load.history.transactions.append(
                Transaction(number, sent, answered, outcome, pushed)
            )
            self._note_pushes(number, pushed, sent, outcome, answer)
            began = min(sent, began)
            if outcome is Outcome.REPEATED:
                # An attempt before this one did it: a seek since then may have undone it.
                said = [Said(t, verb, True) for t, verb in zip(ids, verbs, strict=True)]
                self._note(claim, began, said, number)
            elif outcome is not Outcome.REFUSED:
                results = answer and [r for r in answer["results"] if r["type"] == "ack"]
                self._note(claim, sent, _said(ids, verbs, results), number)
            if outcome is not Outcome.UNKNOWN:
                return
            await trio.sleep(RETRY_SECONDS)

    def _note_pushes(
        self,
        number: int,
        pushed: Sequence[tuple[Place, str]],
        sent: float,
        outcome: Outcome,
        answer: Any,
    ) -> None:
        status = STATUSES[outcome]
        names = [None] * len(pushed)
        if outcome is Outcome.COMMITTED:
            names = [r["messageId"] for r in answer["results"] if r["type"] == "push"]
        answered = None if answer is None else trio.current_time()
        for (place, transaction_id), name in zip(pushed, names, strict=True):
            # A request of its own each: they are in different partitions.
            self.load.history.pushes.append(
                Push(number, 0, -1, place, transaction_id, sent, answered, status, name)
            )

    async def _extend(self, claim: Claim) -> None:
        seconds = claim.lease_seconds
        path = f"/api/v1/lease/{claim.lease}/extend"
        sent, answer = await self.load.post(self.random, path, {"seconds": seconds})
        # Success may mean that only other partitions' leases were renewed, had this one run out.
        in_time = trio.current_time() < claim.sent + claim.lease_seconds
        if answer is not None and answer["success"] and in_time:
            self.load.history.extensions.append(Extension(claim.lease, sent, seconds))


def _outcome(answer: Any) -> Outcome:
    if answer is None:
        return Outcome.UNKNOWN
    if answer["success"]:
        return Outcome.COMMITTED
    return Outcome.REPEATED if answer["error"].startswith("QDUP") else Outcome.REFUSED


def _verbs(ids: Sequence[str], last: Verb) -> list[Verb]:
    return [Verb.COMPLETED] * (len(ids) - 1) + [last]


def _items(
    claim: Claim, partition_id: str, ids: Sequence[str], verbs: Sequence[Verb]
) -> list[Json]:
    return [
        {
            "transactionId": transaction_id,
            "partitionId": partition_id,
            "leaseId": claim.lease,
            "status": verb.value,
            "consumerGroup": claim.group,
        }
        for transaction_id, verb in zip(ids, verbs, strict=True)
    ]


def _said(ids: Sequence[str], verbs: Sequence[Verb], results: Any) -> list[Said]:
    """What was said, and what was answered to it, if anything was."""
    if results is None:
        return [Said(t, verb, None) for t, verb in zip(ids, verbs, strict=True)]
    return [
        Said(t, verb, result["success"], bool(result["dlq"]))
        for t, verb, result in zip(ids, verbs, results, strict=True)
    ]

"""The use-cases of one broker process, put together."""

from __future__ import annotations

from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio
from attrs import define, field

from queen_trio.model.ids import Uuid7
from queen_trio.spool import Drain
from queen_trio.store.backlog import BacklogStore
from queen_trio.store.dlq import DeadLetterStore
from queen_trio.store.groups import GroupStore
from queen_trio.store.messages import MessageStore
from queen_trio.store.replay import ReplayStore
from queen_trio.store.resources import ResourceStore
from queen_trio.store.streams import StreamStore
from queen_trio.store.system import SystemStore
from queen_trio.store.traces import TraceStore

from .ack import AckService, open_ack_service
from .arbiter import Arbiter
from .backlog import Backlog
from .buffer import PushBuffer
from .candidates import Candidates
from .deliveries import Deliveries
from .dlq import DeadLetterService
from .encryption import Encryption
from .groups import GroupService
from .hints import FanOut, Hints, LocalHints
from .history import History
from .maintenance import Maintenance
from .messages import MessageService
from .pop import PopService
from .push import PushService, open_push_service
from .queues import QueueService
from .replay import ReplayService
from .resources import ResourceService
from .streams import StreamService
from .traces import TraceService
from .traffic import CountingStore, Requests, Traffic
from .transaction import TransactionService
from .wakeups import Wakeups

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from queen_trio.config import Config
    from queen_trio.model.jobs import JobStatistics
    from queen_trio.model.mesh import MeshStatistics
    from queen_trio.spool import Spool
    from queen_trio.store.queries import Store

    from .siblings import Siblings


@define(eq=False, kw_only=True)
class Broker:
    """What the HTTP handlers, the mesh and the jobs work with; open it with `open_broker`."""

    config: Config
    store: Store
    wakeups: Wakeups
    candidates: Candidates | None
    local_hints: LocalHints
    hints: Hints
    pushes: PushService
    pops: PopService
    acks: AckService
    transactions: TransactionService
    queues: QueueService
    encryption: Encryption
    traffic: Traffic
    groups: GroupService
    resources: ResourceService
    dead_letters: DeadLetterService
    messages: MessageService
    traces: TraceService
    streams: StreamService
    maintenance: Maintenance
    spool: Spool
    spool_drain: Drain
    arbiter: Arbiter
    backlog: Backlog
    requests: Requests = field(factory=Requests)
    draining: bool = False
    # Crashes of what the daemon supervises, by name.
    restarts: Counter[str] = field(factory=Counter)
    # Set by the daemon.
    job_statistics: Callable[[], Sequence[JobStatistics]] = tuple
    # Set by the daemon, where this broker is one of several workers.
    siblings: Siblings | None = None
    # Set by the daemon, where there is a mesh.
    mesh_statistics: Callable[[], MeshStatistics] | None = None

    def drain(self, *, answer_parked: bool) -> None:
        """Turn unready; answer parked pops now and park none any more, or keep them (spec 4)."""
        self.draining = True
        if answer_parked:
            self.wakeups.drain()


@asynccontextmanager
async def open_broker(
    config: Config, store: Store, spool: Spool, others: Hints | None = None
) -> AsyncIterator[Broker]:
    """Run the services of a broker; leaving flushes accepted pushes and acks.

    `others` passes hints on to the other brokers, where there are any.

    Cancellation drops what is accepted and not yet sent; its callers get an error.
    """
    ids = Uuid7()
    traffic = Traffic()
    store = CountingStore(store, traffic)
    arbiter = Arbiter(config.flow, lambda: store.pool.limit)
    store.pool.admission = arbiter
    wakeups = Wakeups(store, config.pop)
    candidates = None
    if config.jobs.hotlist:
        candidates = Candidates(store, wakeups, config.pop.max_ms / 1000)
        wakeups.candidates = candidates
    maintenance = Maintenance(SystemStore(store.pool))
    local = LocalHints(wakeups, candidates, maintenance)
    hints: Hints = local if others is None else FanOut([local, others])
    encryption = Encryption(store, config.security.encryption_key)
    deliveries = Deliveries()
    letters = DeadLetterStore(store.pool, store.tenant)
    messages = MessageStore(store.pool, store.tenant)
    max_bytes = config.pop.max_bytes
    available = hints.messages_available
    history = History(store)
    replays = ReplayService(store, ReplayStore(store), history, encryption, traffic, available)
    async with trio.open_nursery() as background:
        background.start_soon(arbiter.serve)  # noqa: ASYNC113 - until then the budget stands
        background.start_soon(wakeups.serve)  # noqa: ASYNC113 - pops only enlist before
        if candidates is not None:
            background.start_soon(candidates.serve)  # noqa: ASYNC113 - the same
        async with (
            open_push_service(
                store,
                ids,
                history,
                encryption,
                maintenance,
                PushBuffer(spool, encryption),
                wakeups.lead,
                available,
            ) as pushes,
            open_ack_service(store, hints, deliveries) as acks,
        ):
            yield Broker(
                config=config,
                store=store,
                wakeups=wakeups,
                candidates=candidates,
                local_hints=local,
                hints=hints,
                pushes=pushes,
                pops=PopService(
                    store,
                    ids,
                    wakeups,
                    candidates,
                    hints,
                    encryption,
                    maintenance,
                    deliveries,
                    config.pop,
                ),
                acks=acks,
                transactions=TransactionService(store, ids, hints, encryption),
                queues=QueueService(store, hints, encryption),
                encryption=encryption,
                traffic=traffic,
                groups=GroupService(GroupStore(store), hints),
                resources=ResourceService(ResourceStore(store), hints),
                dead_letters=DeadLetterService(
                    letters, messages, store, ids, hints, encryption, max_bytes
                ),
                messages=MessageService(messages, letters, encryption, max_bytes),
                traces=TraceService(TraceStore(store.pool, store.tenant), max_bytes),
                streams=StreamService(
                    StreamStore(store.pool, store.tenant), ids, hints, encryption
                ),
                maintenance=maintenance,
                spool=spool,
                spool_drain=Drain(
                    spool,
                    replays.replay,
                    lambda: maintenance.push,
                    config.file_buffer.max_batch,
                ),
                arbiter=arbiter,
                backlog=Backlog(BacklogStore(store)),
            )
        background.cancel_scope.cancel()

"""The private PostgreSQL as a context: it runs while the body does."""

from __future__ import annotations

import contextlib
import os
from functools import partial
from typing import TYPE_CHECKING

import trio

from queen_trio.embedded import locks
from queen_trio.embedded.account import choose_account
from queen_trio.embedded.binaries import find_binaries
from queen_trio.embedded.cluster import Cluster
from queen_trio.embedded.errors import EmbeddedError
from queen_trio.embedded.server import Embedded, Server
from queen_trio.grace import Grace

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path


@contextlib.asynccontextmanager
async def open_embedded(
    data_dir: Path,
    *,
    binaries: Path | None = None,
    settings: Mapping[str, str] | None = None,
    grace: Grace | None = None,
) -> AsyncIterator[Embedded]:
    """Run a private PostgreSQL on `data_dir`, made at the first start; yields it once it is ready.

    `binaries` is a directory with its programs (default: see `find_binaries`), `settings` are
    further PostgreSQL settings. A start has no deadline while the server works on it: recovery may
    take minutes, and its progress is logged. If the server dies, it is restarted once; if it dies
    again within a minute or can't start, the body is cancelled and the context raises
    `EmbeddedError` with the log's path, as it does where a first start is impossible. Leaving, even
    by cancellation, stops the server within 15 s, or a second after the limit of `grace`: then it
    is killed, which its data survive.
    """
    grace = grace or Grace()
    cluster = Cluster.at(data_dir)
    async with contextlib.AsyncExitStack() as stack:
        try:
            cluster.make(as_root=os.geteuid() == 0)
            stack.callback(os.close, await locks.acquire_daemon_lock(cluster.daemon_lock))
            server = await grace.run_sync(
                partial(_plan, cluster, binaries, dict(settings or {}), grace)
            )
        except OSError as error:
            raise EmbeddedError(f"can't use the data directory {data_dir}: {error}") from error
        stack.push_async_callback(server.stop)
        embedded = await server.start()
        async with _open_bare_nursery() as nursery:
            nursery.start_soon(server.keep_running, embedded)
            yield embedded
            nursery.cancel_scope.cancel()


def _plan(cluster: Cluster, setting: Path | None, settings: dict[str, str], grace: Grace) -> Server:
    """Decide on account and programs; blocks for as long as they take to answer."""
    account = choose_account(cluster.pgdata)
    closed = account.first_closed(cluster.data_dir)
    if closed is not None:
        raise EmbeddedError(
            f"PostgreSQL can't run as root, and the account {account.name} can't enter {closed}, "
            f"on the way to the data directory {cluster.data_dir}: set QUEEN_DATA_DIR to a "
            f"directory that it can reach (such as /var/lib/queen-trio)"
        )
    found = find_binaries(setting, major=cluster.major(), account=account)
    return Server(cluster=cluster, account=account, binaries=found, settings=settings, grace=grace)


@contextlib.asynccontextmanager
async def _open_bare_nursery() -> AsyncIterator[trio.Nursery]:
    """A nursery whose only fault, the body's or the child's, comes out as itself."""
    only: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
    except BaseExceptionGroup as group:
        if len(group.exceptions) != 1:
            raise
        only = group.exceptions[0]
    if only is not None:
        raise only  # out here, where it keeps its own cause and context

"""The environments of the workers of `serve --workers N`: one broker's configuration, shared out.

A worker is a replica like any other (spec 8.27). It gets a name, a spool, a port of the mesh and
the others as peers; what is a budget of the host is divided among all.
"""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING, Final

from queen_trio.errors import ConfigError

from .load import VARIABLES, load, own_environment
from .parsers import UNSPECIFIED_PORT, Integer, Peer, PeerList
from .sections import SECTIONS, Config
from .variables import variables

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

# Budgets: what the operator grants is for the host, however many workers there are.
_DIVIDED: Final = (
    "DB_POOL_SIZE",
    "QUEEN_ADMISSION_POOL_RESERVE",
    "QUEEN_ADMISSION_MIN",
    "QUEEN_ADMISSION_MAX",
    "FILE_BUFFER_MAX_BYTES",
)
# Where a listener on every address is reached from its own host.
_LOOPBACK: Final = {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "::": "::1"}  # noqa: S104
_LOCALHOST: Final = "127.0.0.1"


def worker_environments(
    config: Config, count: int, spool: Path, environ: Mapping[str, str] | None = None
) -> list[dict[str, str]]:
    """The environment of each of `count` workers, made from that which `config` was read from.

    `spool` is the directory that holds their spools. How to reach an embedded PostgreSQL is left to
    the caller: there, none of the variables PG_* is set. Raises `ConfigError` with all faults, when
    a budget is too small to be divided or a port doesn't exist or is taken twice.
    """
    environ = own_environment() if environ is None else environ
    shares = _shares(config, count)
    secret = config.sync.secret
    alone = not config.sync.peers
    if alone and secret is None:
        # Nobody but these workers has to know it, and nobody else on the host shall speak to them.
        secret = secrets.token_hex(32)
    bind_addr = _LOCALHOST if alone else config.sync.mesh_bind_addr
    ports = [config.sync.mesh_port + index for index in range(count)]
    host = _LOOPBACK.get(bind_addr, bind_addr)
    remote = list(_remote_peers(config, environ, count))
    kept = _kept(config, environ)
    environments = []
    for index, port in enumerate(ports):
        siblings = [Peer(host, other) for other in ports if other != port]
        ours = {
            "QUEEN_SERVER_ID": f"{config.sync.server_id}-{index}",
            "QUEEN_MESH_PORT": str(port),
            "QUEEN_MESH_BIND_ADDR": bind_addr,
            "QUEEN_MESH_PEERS": ",".join(map(str, [*siblings, *remote])),
            "FILE_BUFFER_DIR": str(spool / str(index)),
            "QUEEN_APPLY_SCHEMA": "false",  # the supervisor has
            **{name: str(parts[index]) for name, parts in shares.items()},
        }
        if secret is not None:
            ours["QUEEN_SYNC_SECRET"] = secret
        environments.append(kept | ours)
    _check(environments)
    return environments


def _shares(config: Config, count: int) -> dict[str, list[int]]:
    """What each worker gets of the budgets; those that aren't set stay so."""
    shares: dict[str, list[int]] = {}
    faults = []
    for title, section in SECTIONS.items():
        for field, variable in variables(section):
            total = getattr(getattr(config, title), field)
            if variable.name not in _DIVIDED or total is None:
                continue
            least = variable.parse.low if isinstance(variable.parse, Integer) else 0
            if total < least * count:
                faults.append(
                    f"{variable.name}={json.dumps(str(total))} is too small for {count} workers:"
                    f" each needs {least}, all of them {least * count}"
                )
            more = total % count
            shares[variable.name] = [total // count + (index < more) for index in range(count)]
    if faults:
        raise ConfigError(faults)
    return shares


def _remote_peers(config: Config, environ: Mapping[str, str], count: int) -> Iterator[Peer]:
    """The workers of other hosts. An entry without a port means as many there as there are here."""
    variable = VARIABLES["QUEEN_MESH_PEERS"]
    text = environ.get(variable.name) or environ.get(variable.alias or "") or ""
    for peer in dict.fromkeys(PeerList()(text)):
        if config.sync.is_named_by(peer):
            continue
        if peer.port == UNSPECIFIED_PORT:
            yield from (Peer(peer.host, config.sync.mesh_port + index) for index in range(count))
        else:
            yield peer


def _kept(config: Config, environ: Mapping[str, str]) -> dict[str, str]:
    """What a worker inherits: all but the settings of one's own server, which isn't its own."""
    kept = dict(environ)
    for variable in VARIABLES.values():
        if variable.alias is not None:
            old = kept.pop(variable.alias, "")
            kept[variable.name] = kept.get(variable.name) or old
    if config.postgres.embedded:
        for name in VARIABLES:
            if name.startswith("PG_") or name in ("QUEEN_DATA_DIR", "QUEEN_PG_BIN"):
                kept.pop(name, None)
    return kept


def _check(environments: list[dict[str, str]]) -> None:
    """Read them as the workers will; raises `ConfigError` with what they would refuse."""
    faults = []
    for index, environment in enumerate(environments):
        try:
            config = load(environment)
            if config.sync.enabled and config.server.port == config.sync.mesh_port:
                # Whatever the addresses: one of the two is mostly every address.
                faults.append(f'PORT="{config.server.port}" is the mesh port of worker {index}')
        except ConfigError as error:
            faults += [f"worker {index}: {fault}" for fault in error.faults]
    if faults:
        raise ConfigError(faults)

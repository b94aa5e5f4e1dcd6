"""Mutual TLS of the mesh: whoever shows a certificate of the authority is a broker."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from attrs import frozen

from queen_trio.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from queen_trio.config import SyncConfig


@frozen
class MeshTls:
    """A context for each end; both show this broker's certificate and demand the other's."""

    listener: ssl.SSLContext
    dialer: ssl.SSLContext


def load_tls(config: SyncConfig) -> MeshTls | None:
    """Load QUEEN_MESH_TLS_*; None where they are not set.

    Raises `ConfigError`, naming the variable, for a file that can't be used.
    """
    if config.tls_cert is None or config.tls_key is None or config.tls_ca is None:
        return None
    tls = MeshTls(
        _trusting(ssl.Purpose.CLIENT_AUTH, config.tls_ca),
        _trusting(ssl.Purpose.SERVER_AUTH, config.tls_ca),
    )
    tls.listener.verify_mode = ssl.CERT_REQUIRED
    for context in (tls.listener, tls.dialer):
        _show(context, config.tls_cert, config.tls_key)
    return tls


def _trusting(purpose: ssl.Purpose, authority: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(purpose, cafile=authority)
    except OSError as error:  # an SSLError is one too
        raise ConfigError([f"QUEEN_MESH_TLS_CA={authority} can't be used: {error}"]) from error


def _show(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    try:
        # The empty password: without one OpenSSL would ask the terminal for that of a locked key.
        context.load_cert_chain(cert, key, password="")
    except OSError as error:
        raise ConfigError(
            [f"QUEEN_MESH_TLS_CERT={cert} with QUEEN_MESH_TLS_KEY={key} can't be used: {error}"]
        ) from error

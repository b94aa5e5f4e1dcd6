"""A token issuer for tests: key pairs, tokens, and a JWKS server on a port of 127.0.0.1."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from contextlib import asynccontextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import jwt
import trio
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from jwt.algorithms import get_default_algorithms

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SECRET = "a shared secret that is long enough for any of the three HS algorithms!"
_CURVES = {"ES256": ec.SECP256R1, "ES384": ec.SECP384R1, "ES512": ec.SECP521R1}


@cache
def private_key(algorithm: str, name: str = "") -> Any:
    """A signing key; the same for the same arguments, as RSA keys take their time."""
    if algorithm.startswith("HS"):
        return SECRET + name
    if algorithm.startswith("RS"):
        return rsa.generate_private_key(65537, 2048)
    if algorithm.startswith("ES"):
        return ec.generate_private_key(_CURVES[algorithm]())
    return ed25519.Ed25519PrivateKey.generate()


def public_pem(algorithm: str, name: str = "") -> str:
    """The verifying half, as JWT_PUBLIC_KEY takes it."""
    key = private_key(algorithm, name).public_key()
    pem: bytes = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return pem.decode()


def jwk(algorithm: str, kid: str | None, **more: Any) -> dict[str, Any]:
    """The verifying half of the key named like its id, as an issuer publishes it."""
    key = private_key(algorithm, kid or "").public_key()
    entry = get_default_algorithms()[algorithm].to_jwk(key, as_dict=True)
    entry.pop("key_ops", None)
    if kid is not None:
        entry["kid"] = kid
    return {**entry, "use": "sig", "alg": algorithm, **more}


def token(
    algorithm: str = "HS256", kid: str | None = None, *, lives: float | None = 600, **claims: Any
) -> str:
    """A token with these claims that lives so many seconds; None is for ever."""
    if lives is not None:
        claims["exp"] = int(time.time() + lives)
    headers = {} if kid is None else {"kid": kid}
    return jwt.encode(claims, private_key(algorithm, kid or ""), algorithm, headers=headers)


def forged(header: dict[str, Any], claims: dict[str, Any], secret: bytes | None) -> str:
    """A token made by hand, as no library would: signed by HMAC-SHA256, or not at all."""
    parts = [_base64(json.dumps(part).encode()) for part in (header, claims)]
    text = ".".join(parts)
    signature = b"" if secret is None else hmac.digest(secret, text.encode(), hashlib.sha256)
    return f"{text}.{_base64(signature)}"


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


class Issuer:
    """The state of a JWKS server; change `body` and `status` as the test needs."""

    def __init__(self) -> None:
        self.status = 200
        self.body: bytes = b""
        self.stalled = False
        self.fetches = 0
        self.publish()
        self.url = ""

    def publish(self, *keys: dict[str, Any]) -> None:
        self.body = json.dumps({"keys": keys}).encode()

    async def answer(self, stream: trio.SocketStream) -> None:
        """Answer requests of one connection, one after the other."""
        request = b""
        async with stream:
            async for chunk in stream:
                request += chunk
                if request.endswith(b"\r\n\r\n"):
                    request = b""
                    self.fetches += 1
                    if self.stalled:
                        continue
                    head = f"HTTP/1.1 {self.status} x\r\ncontent-length: {len(self.body)}\r\n\r\n"
                    await stream.send_all(head.encode() + self.body)


@asynccontextmanager
async def open_issuer() -> AsyncIterator[Issuer]:
    """Serve an issuer for the block's time."""
    issuer = Issuer()
    [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
    issuer.url = f"http://127.0.0.1:{listener.socket.getsockname()[1]}/keys"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, issuer.answer, [listener])
        yield issuer
        nursery.cancel_scope.cancel()

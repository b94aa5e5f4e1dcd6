"""The keys that verify tokens: one from the configuration, or those that an issuer publishes.

An issuer's keys (JWKS, RFC 7517) are fetched by a task of their own. A request waits for a fetch
only where it names a key that isn't known, and such fetches keep a distance: whoever sends made-up
key ids can't make the broker hammer the issuer. While the issuer is away the last keys stay.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, Protocol

import httpx
import structlog
import trio
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from jwt import PyJWK, PyJWTError

from queen_trio.errors import ConfigError, QueenError

if TYPE_CHECKING:
    from queen_trio.config import AuthConfig, JwtAlgorithm

    PublicKey = RSAPublicKey | EllipticCurvePublicKey | Ed25519PublicKey
    Key = bytes | PublicKey

log = structlog.get_logger(__name__)

# Issuers announce a key hours before they use it, and forget none in minutes.
REFRESH_SECONDS: Final = 300.0
# Between fetches, however many unknown key ids arrive or failures occur.
DISTANCE_SECONDS: Final = 5.0
# Before there is any key; nobody gets in without one.
FIRST_RETRY_SECONDS: Final = 1.0
# One fetch in all; also how long a request waits for it.
FETCH_SECONDS: Final = 5.0
# Real sets have a few KiB.
MAX_JWKS_BYTES: Final = 1024 * 1024
# RFC 7518, 3.3.
MIN_RSA_BITS: Final = 2048

_KTY: Final = {"RS": "RSA", "ES": "EC", "Ed": "OKP"}
_CURVES: Final = {"ES256": "secp256r1", "ES384": "secp384r1", "ES512": "secp521r1"}


class KeysUnavailable(QueenError):
    """No key has ever been fetched, so that no token can be judged yet."""


class KeySource(Protocol):
    """Where a verifier gets the key for a token from."""

    async def key_for(self, kid: str | None) -> Key | None:
        """Find the key of this id; raises `KeysUnavailable` before there are any."""

    async def serve(self) -> None:
        """Keep the keys fresh until cancelled; returns where there is nothing to do."""


def key_source(auth: AuthConfig) -> KeySource:
    """Make the source that the configuration asks for; raises `ConfigError` for an unusable key."""
    if auth.jwks_url is not None:
        return JwksKeys(auth.jwks_url, auth.algorithm)
    if auth.secret is not None:
        return StaticKey(auth.secret.encode())
    # From one line of an environment file the line breaks arrive as "\n" in two characters.
    pem = (auth.public_key or "").replace("\\n", "\n")
    try:
        key = load_pem_public_key(pem.encode())
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(["JWT_PUBLIC_KEY is not a public key in PEM"]) from None
    try:
        return StaticKey(_fitting(key, auth.algorithm))
    except ValueError as error:
        raise ConfigError([f"JWT_PUBLIC_KEY: {error}"]) from None


class StaticKey:
    """One key for every token, whatever id it names."""

    def __init__(self, key: Key) -> None:
        self._key = key

    async def key_for(self, kid: str | None) -> Key | None:
        """The key."""
        return self._key

    async def serve(self) -> None:
        """Nothing changes here."""


class JwksKeys:
    """An issuer's published keys, as of the last fetch that succeeded; needs `serve` running."""

    def __init__(self, url: str, algorithm: JwtAlgorithm) -> None:
        if not _is_http(url):
            raise ConfigError([f"JWT_JWKS_URL={url} is no URL of http or https"])
        self._url = url
        self._algorithm = algorithm
        self._keys: dict[str | None, PublicKey] = {}
        self._wanted = trio.Event()
        self._fetched = trio.Event()
        self._next_fetch = -float("inf")  # no request may cause one before

    async def key_for(self, kid: str | None) -> Key | None:
        """Find a key, fetching the set again for an unknown one, but not too often.

        Raises `KeysUnavailable` before the first set has arrived; blocks for `FETCH_SECONDS` at
        most.
        """
        key = self._find(kid)
        if key is None and trio.current_time() >= self._next_fetch:
            self._wanted.set()
            with trio.move_on_after(FETCH_SECONDS):
                await self._fetched.wait()
            key = self._find(kid)
        if not self._keys:
            raise KeysUnavailable("the keys of the issuer have not been fetched yet")
        return key

    def _find(self, kid: str | None) -> PublicKey | None:
        if kid is None and len(self._keys) == 1:  # nothing to choose
            return next(iter(self._keys.values()))
        return self._keys.get(kid)

    async def serve(self) -> None:
        """Fetch now, every five minutes, and when a token names an unknown key."""
        async with httpx.AsyncClient(timeout=FETCH_SECONDS) as client:
            while True:
                fresh = await self._fetch(client)
                distance = DISTANCE_SECONDS if self._keys else FIRST_RETRY_SECONDS
                self._next_fetch = trio.current_time() + distance
                self._fetched.set()
                self._fetched, self._wanted = trio.Event(), trio.Event()
                with trio.move_on_after(REFRESH_SECONDS if fresh else distance):
                    await self._wanted.wait()
                self._next_fetch = -float("inf")  # under way: whoever needs a key may wait for it

    async def _fetch(self, client: httpx.AsyncClient) -> bool:
        try:
            with trio.fail_after(FETCH_SECONDS):
                body = await self._download(client)
            keys = parse_jwks_untrusted(body, self._algorithm)
        except (httpx.HTTPError, trio.TooSlowError, ValueError) as error:
            log.warning(
                "signing keys not fetched", url=self._url, keys=len(self._keys),
                error=str(error) or type(error).__name__,
            )  # fmt: skip
            return False
        if keys.keys() != self._keys.keys():
            log.info("signing keys fetched", url=self._url, keys=len(keys))
        self._keys = keys
        return True

    async def _download(self, client: httpx.AsyncClient) -> bytes:
        async with client.stream("GET", self._url) as response:
            if response.status_code != 200:
                raise ValueError(f"the issuer answered {response.status_code}")
            body = b""
            async for chunk in response.aiter_bytes():
                if len(body) <= MAX_JWKS_BYTES:  # the rest is read, but not kept
                    body += chunk
        if len(body) > MAX_JWKS_BYTES:
            raise ValueError(f"the key set has more than {MAX_JWKS_BYTES} bytes")
        return body


def _is_http(url: str) -> bool:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return parsed.scheme in ("http", "https") and bool(parsed.host)


def parse_jwks_untrusted(body: bytes, algorithm: JwtAlgorithm) -> dict[str | None, PublicKey]:
    """Take from a key set those keys that sign with `algorithm`, by their id.

    Raises `ValueError` when there is none: a broken or empty set must not replace a good one.
    """
    try:
        found = json.loads(body)
    except RecursionError:
        raise ValueError("the key set is nested too deeply") from None
    entries = found.get("keys") if isinstance(found, dict) else None
    if not isinstance(entries, list):
        raise ValueError('the key set is no object with "keys"')  # noqa: TRY004 - of its text
    keys: dict[str | None, PublicKey] = {}
    for entry in entries:
        if not _is_for_us(entry, algorithm):
            continue
        kid = entry.get("kid")
        try:
            # RFC 7517, 4: an implementation passes over keys that it can't use.
            keys[kid] = _fitting(PyJWK(entry, algorithm.value).key, algorithm)
        except (PyJWTError, ValueError, KeyError, TypeError) as error:
            log.warning("signing key ignored", kid=kid, error=str(error))
    if not keys:
        raise ValueError(f"the key set has no usable key for {algorithm.value}")
    return keys


def _is_for_us(entry: object, algorithm: JwtAlgorithm) -> bool:
    """Tell whether a key may verify signatures by `algorithm`; never a shared secret."""
    return (
        isinstance(entry, dict)
        and entry.get("kty") == _KTY.get(algorithm.value[:2])
        and entry.get("use", "sig") == "sig"
        and entry.get("alg", algorithm.value) == algorithm.value
        and isinstance(entry.get("kid"), str | None)
    )


def _fitting(key: object, algorithm: JwtAlgorithm) -> PublicKey:
    """Return a public key that is of the algorithm's kind, long enough; raises `ValueError`."""
    family = algorithm.value[:2]
    if family == "RS" and isinstance(key, RSAPublicKey):
        if key.key_size < MIN_RSA_BITS:
            raise ValueError(f"an RSA key of {key.key_size} bits is too short")
        return key
    if family == "ES" and isinstance(key, EllipticCurvePublicKey):
        if key.curve.name != _CURVES[algorithm.value]:
            raise ValueError(f"{algorithm.value} doesn't use the curve {key.curve.name}")
        return key
    if family == "Ed" and isinstance(key, Ed25519PublicKey):
        return key
    raise ValueError(f"not a public key for {algorithm.value}")

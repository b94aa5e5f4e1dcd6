"""Roles, tokens, keys, and the table of what each route asks."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest
import trio
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from jwt.algorithms import RSAAlgorithm

from queen_trio.config import AuthConfig, JwtAlgorithm
from queen_trio.errors import ConfigError
from queen_trio.http import app, tokens
from queen_trio.http.auth import ROUTE_ACCESS, access_to
from queen_trio.http.jwks import (
    DISTANCE_SECONDS,
    FETCH_SECONDS,
    FIRST_RETRY_SECONDS,
    MAX_JWKS_BYTES,
    REFRESH_SECONDS,
    JwksKeys,
    KeysUnavailable,
    StaticKey,
    key_source,
    parse_jwks_untrusted,
)
from queen_trio.http.tokens import LEEWAY_SECONDS, REMEMBER_SECONDS, TokenRefused, TokenVerifier
from queen_trio.model.roles import Access, Identity, Role, roles_untrusted
from tests.issuer import (
    SECRET,
    forged,
    jwk,
    open_issuer,
    private_key,
    public_pem,
    token,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trio.testing import MockClock

    from queen_trio.http.jwks import Key

ALGORITHMS = [algorithm.value for algorithm in JwtAlgorithm]
KEY_PAIRS = [algorithm for algorithm in ALGORITHMS if not algorithm.startswith("HS")]


def auth(algorithm: str = "HS256", name: str = "") -> AuthConfig:
    """A configuration that accepts what `issuer.token` signs."""
    if algorithm.startswith("HS"):
        return AuthConfig(enabled=True, algorithm=JwtAlgorithm(algorithm), secret=SECRET + name)
    return AuthConfig(
        enabled=True, algorithm=JwtAlgorithm(algorithm), public_key=public_pem(algorithm, name)
    )


def verifier(algorithm: str = "HS256", clock: Callable[[], float] = time.time) -> TokenVerifier:
    config = auth(algorithm)
    return TokenVerifier(config.algorithm, key_source(config), clock)


# -- routes and roles ------------------------------------------------------------------------------


def test_the_table_has_every_route_and_no_other() -> None:
    served = {
        path: {method for method in methods if method != "HEAD"}
        for path, methods in app._ROUTES.items()
    }
    assert {path: set(methods) for path, methods in ROUTE_ACCESS.items()} == served


def test_a_forgotten_route_is_for_admins() -> None:
    assert access_to("/api/v1/new", "GET") is Access.ADMIN
    assert access_to("/health", "POST") is Access.ADMIN


def test_head_asks_what_get_asks() -> None:
    for methods in app._ROUTES.values():
        if "HEAD" in methods:
            assert methods["HEAD"] == methods["GET"]


def test_only_health_and_metrics_are_public_and_operation_is_for_admins() -> None:
    for path, methods in ROUTE_ACCESS.items():
        for access in methods.values():
            assert (access is Access.PUBLIC) == (
                path == "/health" or path.startswith("/metrics")
            ), path
            if path.startswith(("/internal/", "/api/v1/system/")):
                assert access is Access.ADMIN, path


@pytest.mark.parametrize(
    ("role", "allowed"),
    [
        (None, {Access.PUBLIC}),
        (Role.READ_ONLY, {Access.PUBLIC, Access.ANY_ROLE, Access.LOOK}),
        (Role.WRITE_ONLY, {Access.PUBLIC, Access.ANY_ROLE, Access.PRODUCE}),
        (Role.READ_WRITE, set(Access) - {Access.ADMIN}),
        (Role.ADMIN, set(Access)),
    ],
)
def test_what_a_role_may(role: Role | None, allowed: set[Access]) -> None:
    identity = Identity("me", frozenset() if role is None else frozenset({role}))
    assert {access for access in Access if identity.may(access)} == allowed


@pytest.mark.parametrize(
    ("claims", "roles"),
    [
        (["admin", None], {Role.ADMIN}),
        ([None, ["read-only", "write-only"]], {Role.READ_ONLY, Role.WRITE_ONLY}),
        (["read-write", "admin"], {Role.READ_WRITE, Role.ADMIN}),
        (["Admin", ["root", 1, None, ["admin"], {"admin": 1}]], set()),
        ([{"admin": True}, 7], set()),
        ([], set()),
    ],
)
def test_roles_of_claims(claims: list[Any], roles: set[Role]) -> None:
    assert roles_untrusted(*claims) == roles


# -- tokens ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ALGORITHMS)
async def test_each_algorithm_verifies_and_refuses_another_key(algorithm: str) -> None:
    good = token(algorithm, sub="me", role="read-only", roles=["write-only"])
    identity = await verifier(algorithm).verify(good)
    assert identity == Identity("me", frozenset({Role.READ_ONLY, Role.WRITE_ONLY}))
    with pytest.raises(TokenRefused, match=r"^the token is invalid$"):
        await verifier(algorithm).verify(token(algorithm, "another", sub="me", role="admin"))


async def test_no_signature_is_no_token() -> None:
    claims = {"sub": "me", "role": "admin"}
    for algorithm in ("none", "None", "NONE", "", None):
        for secret in (None, b"", SECRET.encode()):
            with pytest.raises(TokenRefused):
                await verifier().verify(forged({"alg": algorithm}, claims, secret))
    stripped = token(role="admin").rpartition(".")[0] + "."
    with pytest.raises(TokenRefused):
        await verifier().verify(stripped)


@pytest.mark.parametrize("algorithm", KEY_PAIRS)
async def test_the_public_key_is_no_shared_secret(algorithm: str) -> None:
    key = private_key(algorithm).public_key()
    for secret in (
        public_pem(algorithm).encode(),
        public_pem(algorithm).strip().encode(),
        key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo),
    ):
        confusing = forged({"alg": "HS256"}, {"role": "admin"}, secret)
        with pytest.raises(TokenRefused):
            await verifier(algorithm).verify(confusing)


async def test_only_the_configured_algorithm_counts() -> None:
    with pytest.raises(TokenRefused):
        await verifier("HS256").verify(token("HS512", role="admin"))
    with pytest.raises(TokenRefused):
        await verifier("HS256").verify(token("RS256", role="admin"))


@pytest.mark.parametrize(
    "text",
    ["", ".", "..", "a.b.c", "x" * 5000, "é.é.é", token() + "x", token()[:-2], "." * 999],
)
async def test_garbage_is_refused_without_a_word_of_why(text: str) -> None:
    with pytest.raises(TokenRefused, match=r"^the token is invalid$"):
        await verifier().verify(text)


async def test_times_have_a_leeway() -> None:
    close, far = LEEWAY_SECONDS / 2, LEEWAY_SECONDS * 2
    now = time.time()
    check = verifier()
    await check.verify(token(lives=-close))
    await check.verify(token(nbf=int(now + close)))
    await check.verify(token(lives=None))
    with pytest.raises(TokenRefused, match=r"^the token has expired$"):
        await check.verify(token(lives=-far))
    with pytest.raises(TokenRefused, match=r"^the token is not valid yet$"):
        await check.verify(token(nbf=int(now + far)))


@pytest.mark.parametrize(
    "claims",
    [
        {"exp": "soon"},
        {"exp": None},
        {"exp": float("inf")},
        {"nbf": []},
        {"sub": 7},
        {"sub": None},
        {"sub": "\ud800"},
    ],
    ids=str,
)
async def test_claims_of_the_wrong_kind(claims: dict[str, Any]) -> None:
    with pytest.raises(TokenRefused, match=r"^the token is invalid$"):
        await verifier().verify(forged({"alg": "HS256"}, claims, SECRET.encode()))


async def test_an_expired_token_of_a_stranger_is_not_told_apart() -> None:
    with pytest.raises(TokenRefused, match=r"^the token is invalid$"):
        await verifier().verify(token(kid="another", lives=-9999))


async def test_an_audience_is_not_ours_to_judge() -> None:
    assert (await verifier().verify(token(aud="somebody", sub="me"))).subject == "me"


class CountingKeys(StaticKey):
    """Counts how often a key was needed: once per verification."""

    asked = 0

    async def key_for(self, kid: str | None) -> Key | None:
        self.asked += 1
        return await super().key_for(kid)


class Watch:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


async def test_a_token_is_verified_once_until_it_expires() -> None:
    keys, watch = CountingKeys(SECRET.encode()), Watch()
    check = TokenVerifier(JwtAlgorithm.HS256, keys, watch)
    short, long = token(sub="short", lives=10), token(sub="long", lives=None)
    for _ in range(3):
        assert (await check.verify(short)).subject == "short"
        assert (await check.verify(long)).subject == "long"
    assert keys.asked == 2
    watch.ahead = 10 + LEEWAY_SECONDS + 1
    await check.verify(long)
    assert keys.asked == 2
    await check.verify(short)  # by the real clock it still is valid, but that has to be found out
    assert keys.asked == 3
    watch.ahead = REMEMBER_SECONDS + 1
    await check.verify(long)
    assert keys.asked == 4


async def test_what_is_remembered_is_bounded_and_the_least_used_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tokens, "REMEMBERED_TOKENS", 2)
    keys = CountingKeys(SECRET.encode())
    check = TokenVerifier(JwtAlgorithm.HS256, keys)
    first, second, third = (token(sub=str(n)) for n in range(3))
    for text in (first, second, first, third, first):
        await check.verify(text)
    assert keys.asked == 3
    await check.verify(second)
    assert keys.asked == 4


async def test_a_refused_token_is_not_remembered() -> None:
    keys = CountingKeys(SECRET.encode())
    check = TokenVerifier(JwtAlgorithm.HS256, keys)
    bad = token(kid="another")
    for _ in range(2):
        with pytest.raises(TokenRefused):
            await check.verify(bad)
    assert keys.asked == 2


# -- keys ------------------------------------------------------------------------------------------


async def test_a_public_key_may_come_in_one_line() -> None:
    config = AuthConfig(
        algorithm=JwtAlgorithm.RS256, public_key=public_pem("RS256").replace("\n", "\\n")
    )
    check = TokenVerifier(config.algorithm, key_source(config))
    await check.verify(token("RS256"))


def test_keys_that_cannot_be_used_end_the_boot() -> None:
    private = private_key("RS256").private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    weak = rsa.generate_private_key(65537, 1024).public_key()
    for key, algorithm, reason in (
        ("nonsense", "RS256", "not a public key in PEM"),
        (private.decode(), "RS256", "not a public key in PEM"),
        (public_pem("RS256"), "ES256", "not a public key for ES256"),
        (public_pem("ES384"), "ES256", "ES256 doesn't use the curve secp384r1"),
        (public_pem("RS256"), "EdDSA", "not a public key for EdDSA"),
        (
            weak.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode(),
            "RS256",
            "1024 bits is too short",
        ),
    ):
        with pytest.raises(ConfigError, match=reason):
            key_source(AuthConfig(algorithm=JwtAlgorithm(algorithm), public_key=key))
    for url in ("file:///etc/passwd", "keys", "http://", "https://[::1", "http://x:port/"):
        with pytest.raises(ConfigError, match="is no URL of http or https"):
            key_source(AuthConfig(algorithm=JwtAlgorithm.RS256, jwks_url=url))


def key_set(*entries: Any) -> bytes:
    return json.dumps({"keys": entries}).encode()


def test_a_key_set_gives_the_keys_that_fit() -> None:
    weak = RSAAlgorithm.to_jwk(rsa.generate_private_key(65537, 1024).public_key(), as_dict=True)
    found = parse_jwks_untrusted(
        key_set(
            jwk("RS256", "a"),
            jwk("RS256", None),
            jwk("RS256", "for-encryption", use="enc"),
            jwk("RS256", "other-hash", alg="RS512"),
            jwk("ES256", "other-kind"),
            {"kty": "oct", "kid": "shared", "k": "c2VjcmV0", "alg": "RS256"},
            {"kty": "RSA", "kid": "broken", "n": "!", "e": 7},
            {"kty": "RSA", "kid": ["a"]},
            {**weak, "kid": "weak"},
            "nonsense",
        ),
        JwtAlgorithm.RS256,
    )
    assert list(found) == ["a", None]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"keys":{}}',
        b'{"keys":[]}',
        b"\xff",
        b"[" * 100_000,
        b"null",
        b"<html>",
    ],
    ids=lambda body: repr(body[:9]),
)
def test_a_set_without_a_key_is_an_error(body: bytes) -> None:
    with pytest.raises(ValueError):
        parse_jwks_untrusted(body, JwtAlgorithm.RS256)


async def serving(keys: JwksKeys, test: Callable[[], Awaitable[None]]) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keys.serve)
        await test()
        nursery.cancel_scope.cancel()


async def next_fetch(keys: JwksKeys, clock: MockClock, seconds: float) -> None:
    """Let time pass, and block until the fetch that is due then has ended, well or not."""
    fetched = keys._fetched
    clock.jump(seconds)
    await fetched.wait()


async def test_keys_are_fetched_before_they_are_needed(mock_clock: MockClock) -> None:
    async with open_issuer() as issuer:
        issuer.publish(jwk("RS256", "a"))
        keys = JwksKeys(issuer.url, JwtAlgorithm.RS256)

        async def test() -> None:
            assert await keys.key_for("a") is not None
            assert await keys.key_for(None) is not None  # the only one there is
            assert issuer.fetches == 1
            await next_fetch(keys, mock_clock, REFRESH_SECONDS)
            assert issuer.fetches == 2

        await serving(keys, test)


async def test_an_unknown_key_is_fetched_but_not_too_often(mock_clock: MockClock) -> None:
    async with open_issuer() as issuer:
        issuer.publish(jwk("RS256", "a"))
        keys = JwksKeys(issuer.url, JwtAlgorithm.RS256)

        async def test() -> None:
            await keys.key_for("a")
            issuer.publish(jwk("RS256", "a"), jwk("RS256", "b"))
            for number in range(20):
                assert await keys.key_for(f"made-up-{number}") is None
            assert await keys.key_for("b") is None
            assert issuer.fetches == 1
            mock_clock.jump(DISTANCE_SECONDS)
            async with trio.open_nursery() as nursery:  # one fetch serves all who wait
                for _ in range(20):
                    nursery.start_soon(keys.key_for, "made-up")
                assert await keys.key_for("b") is not None
            assert issuer.fetches == 2

        await serving(keys, test)


@pytest.mark.parametrize("trouble", ["status", "empty", "html", "huge", "stall"])
async def test_an_issuer_in_trouble_costs_no_key(mock_clock: MockClock, trouble: str) -> None:
    async with open_issuer() as issuer:
        issuer.publish(jwk("RS256", "a"))
        keys = JwksKeys(issuer.url, JwtAlgorithm.RS256)

        async def test() -> None:
            assert await keys.key_for("a") is not None
            if trouble == "status":
                issuer.status = 503
            elif trouble == "stall":
                issuer.stalled = True
            else:
                issuer.body = {
                    "empty": b'{"keys":[]}',
                    "html": b"<html>",
                    "huge": b" " * (MAX_JWKS_BYTES + 1),
                }[trouble]
            if trouble == "stall":
                mock_clock.jump(REFRESH_SECONDS)
                while issuer.fetches < 2:
                    await trio.lowlevel.checkpoint()
                await next_fetch(keys, mock_clock, FETCH_SECONDS)
            else:
                await next_fetch(keys, mock_clock, REFRESH_SECONDS)
            assert issuer.fetches == 2
            assert await keys.key_for("a") is not None
            issuer.status, issuer.stalled = 200, False
            issuer.publish(jwk("RS256", "b"))
            await next_fetch(keys, mock_clock, DISTANCE_SECONDS)
            assert await keys.key_for("b") is not None
            assert await keys.key_for("a") is None

        await serving(keys, test)


async def test_without_any_key_nothing_can_be_judged(mock_clock: MockClock) -> None:
    async with open_issuer() as issuer:
        issuer.status = 500
        keys = JwksKeys(issuer.url, JwtAlgorithm.RS256)

        async def test() -> None:
            with pytest.raises(KeysUnavailable):
                await keys.key_for("a")
            issuer.status = 200
            issuer.publish(jwk("RS256", "a"))
            mock_clock.jump(FIRST_RETRY_SECONDS)
            assert await keys.key_for("a") is not None

        await serving(keys, test)

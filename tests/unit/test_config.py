"""The configuration: every default that the specification names, and every way to get it wrong."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from queen_trio.config import (
    AdmissionBand,
    Config,
    DrainParked,
    FlowConfig,
    HttpServer,
    JwtAlgorithm,
    Peer,
    PopConfig,
    SubscriptionMode,
    boot_lines,
    load,
    reference_page,
    table,
)
from queen_trio.config.load import VARIABLES
from queen_trio.config.parsers import Boolean, Decimal, HexKey, Integer, PeerList, Word
from queen_trio.errors import ConfigError
from queen_trio.log import LogLevel

REPOSITORY = Path(__file__).parents[2]
EXTERNAL = {"PG_HOST": "db"}

# Specification 2 to 5 and 8, name by name.
DEFAULTS = {
    "PORT": 6632,
    "QUEEN_BIND_ADDR": "0.0.0.0",
    "QUEEN_HTTP_SERVER": HttpServer.LEAN,
    "QUEEN_TLS_CERT": None,
    "QUEEN_TLS_KEY": None,
    "QUEEN_MAX_BODY_BYTES": 64 * 1024 * 1024,
    "QUEEN_SHUTDOWN_TIMEOUT_MS": 50_000,
    "QUEEN_DRAIN_PARKED": DrainParked.ANSWER,
    "PG_HOST": "db",
    "PG_PORT": 5432,
    "PG_USER": "postgres",
    "PG_PASSWORD": None,
    "PG_DATABASE": "postgres",
    "PG_USE_SSL": False,
    "PG_SSL_ROOT_CERT": None,
    "PG_SSL_REJECT_UNAUTHORIZED": True,
    "DB_POOL_SIZE": 160,
    "QUEEN_STMT_TIMEOUT_MS": 30_000,
    "QUEEN_APPLY_SCHEMA": True,
    "QUEEN_DATA_DIR": Path("queen-data"),
    "QUEEN_PG_BIN": None,
    "POP_WAIT_INITIAL_INTERVAL_MS": 100,
    "POP_WAIT_BACKOFF_THRESHOLD": 3,
    "POP_WAIT_BACKOFF_MULTIPLIER": 2.0,
    "POP_WAIT_MAX_INTERVAL_MS": 1000,
    "DEFAULT_TIMEOUT": 30_000,
    "DEFAULT_SUBSCRIPTION_MODE": SubscriptionMode.NEW,
    "QUEEN_POP_MAX_BYTES": 16 * 1024 * 1024,
    "JWT_ENABLED": False,
    "JWT_ALGORITHM": JwtAlgorithm.HS256,
    "JWT_SECRET": None,
    "JWT_PUBLIC_KEY": None,
    "JWT_JWKS_URL": None,
    "QUEEN_SYNC_ENABLED": True,
    "QUEEN_MESH_PEERS": (),
    "QUEEN_MESH_PORT": 6633,
    "QUEEN_MESH_BIND_ADDR": "0.0.0.0",
    "QUEEN_SYNC_SECRET": None,
    "QUEEN_SYNC_HEARTBEAT_MS": 1000,
    "QUEEN_SYNC_DEAD_THRESHOLD_MS": 5000,
    "QUEEN_MESH_TLS_CERT": None,
    "QUEEN_MESH_TLS_KEY": None,
    "QUEEN_MESH_TLS_CA": None,
    "QUEEN_ADMISSION_POOL_RESERVE": 16,
    "QUEEN_ADMISSION_MIN": None,
    "QUEEN_ADMISSION_MAX": None,
    "QUEEN_ADMISSION_TICK_MS": 500,
    "QUEEN_ADMISSION_TRAIN_GAP_US": 300,
    "RETENTION_INTERVAL": 5000,
    "PARTITION_CLEANUP_DAYS": 30,
    "STATS_INTERVAL_MS": 10_000,
    "METRICS_FLUSH_MS": 60_000,
    "QUEEN_CACHE_REFRESH_INTERVAL_MS": 60_000,
    "QUEEN_HOTLIST": True,
    "FILE_BUFFER_DIR": Path("/var/lib/queen/buffers"),
    "FILE_BUFFER_FLUSH_MS": 100,
    "FILE_BUFFER_MAX_BATCH": 100,
    "FILE_BUFFER_MAX_BYTES": 10 * 1024**3,
    "QUEEN_ENCRYPTION_KEY": None,
    "LOG_LEVEL": LogLevel.INFO,
    "QUEEN_LOG_JSON": False,
    "QUEEN_LOG_RATES_MS": 10_000,
}

FACES_OF_TRUE = ["true", "TRUE", "1", "yes", "Yes", "on", "oN"]
FACES_OF_FALSE = ["false", "False", "0", "no", "NO", "off", "OFF"]


def value_of(config: Config, name: str) -> object:
    """The effective value of the variable `name`, wherever its section is."""
    for section in (getattr(config, field.name) for field in attrs.fields(Config)):
        for field in attrs.fields(type(section)) if attrs.has(type(section)) else ():
            if field.metadata["queen_trio.variable"].name == name:
                return getattr(section, field.name)
    raise LookupError(name)


def faults(environ: dict[str, str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(environ)
    return caught.value.faults


@pytest.mark.parametrize(("name", "value"), DEFAULTS.items(), ids=DEFAULTS)
def test_default(name: str, value: object) -> None:
    assert value_of(load(EXTERNAL), name) == value


def test_no_default_escapes_the_list_above() -> None:
    extra = {"QUEEN_SERVER_ID", "QUEEN_HTTP_HEADER_TIMEOUT_MS", "QUEEN_HTTP_KEEP_ALIVE_MS"}
    assert VARIABLES.keys() == DEFAULTS.keys() | extra


def test_server_id_is_the_host_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "queen-7")
    assert load({}).sync.server_id == "queen-7"
    assert load({"QUEEN_SERVER_ID": "a"}).sync.server_id == "a"


def test_embedded_defaults() -> None:
    config = load({"QUEEN_DATA_DIR": "/srv/q"})
    assert config.postgres.embedded
    assert config.postgres.pool_size == 32
    assert config.file_buffer.directory == Path("/srv/q/buffers")
    assert load({"DB_POOL_SIZE": "5"}).postgres.pool_size == 5


def test_a_section_made_by_hand_has_the_defaults() -> None:
    assert PopConfig(max_ms=50) == attrs.evolve(load({}).pop, max_ms=50)


def test_empty_is_unset() -> None:
    assert load(dict.fromkeys(VARIABLES, "")) == load({})


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", "7001")
    assert load().server.port == 7001


def test_the_manifest_of_the_seeds() -> None:
    config = load(
        {
            "PG_HOST": "queen-pg",
            "PG_PORT": "5432",
            "PG_USER": "queen",
            "PG_DATABASE": "queen",
            "PG_PASSWORD": "change-me",
            "DB_POOL_SIZE": "60",
            "PORT": "6632",
            "QUEEN_MESH_PORT": "6633",
            "QUEEN_MESH_PEERS": "queen-0.queen-mesh:6633,queen-1.queen-mesh:6633",
            "QUEEN_SYNC_SECRET": "change-me-too",
            "QUEEN_SERVER_ID": "queen-0",
            "FILE_BUFFER_DIR": "/var/lib/queen/buffers",
            "QUEEN_LOG_JSON": "true",
            # What Kubernetes adds for the Services `queen` and `queen-pg`.
            "QUEEN_PORT": "tcp://10.0.0.1:6632",
            "QUEEN_SERVICE_HOST": "10.0.0.1",
            "QUEEN_SERVICE_PORT": "6632",
            "QUEEN_SERVICE_PORT_HTTP": "6632",
            "QUEEN_PORT_6632_TCP": "tcp://10.0.0.1:6632",
            "QUEEN_PORT_6632_TCP_PROTO": "tcp",
            "QUEEN_PORT_6632_TCP_PORT": "6632",
            "QUEEN_PORT_6632_TCP_ADDR": "10.0.0.1",
            "QUEEN_PG_SERVICE_HOST": "10.0.0.2",
            "QUEEN_PG_PORT_5432_TCP_ADDR": "10.0.0.2",
        }
    )
    assert config.warnings == ()
    assert config.sync.starts
    assert config.sync.auth == "hmac"
    assert config.admission_band == AdmissionBand(29, 44)


# Faults


def test_all_faults_come_together_each_with_its_name_and_value() -> None:
    assert faults(
        {
            "JWT_ENABLED": "maybe",
            "PORT": "1_0",
            "DB_POOL_SIZE": "1000000",
            "QUEEN_TLS_CERT": "/cert.pem",
        }
    ) == [
        'PORT="1_0" is not an integer (0 to 65535)',
        'DB_POOL_SIZE="1000000" is out of range (4 to 10000)',
        'JWT_ENABLED="maybe" is not a boolean (true/false, 1/0, yes/no, on/off)',
        "QUEEN_TLS_CERT and QUEEN_TLS_KEY go together: only one of them is set",
    ]


def test_a_fault_names_the_spelling_that_was_used() -> None:
    assert faults({"QUEEN_UDP_NOTIFY_PORT": "x"})[0].startswith('QUEEN_UDP_NOTIFY_PORT="x"')


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"LOG_LEVEL": "loud"}, "is not one of debug, info, warning, error, critical"),
        ({"QUEEN_BIND_ADDR": "a b"}, "white space"),
        ({"PORT": "９"}, "is not an integer"),
        ({"PORT": "9" * 5000}, "is out of range"),
        ({"POP_WAIT_BACKOFF_MULTIPLIER": "nan"}, "is not a number"),
        ({"QUEEN_MESH_PEERS": "a:1,::1"}, "entry '::1' is not host[:port] (IPv6 goes in brackets)"),
        ({"QUEEN_MESH_PEERS": "a,b:99999"}, "entry 'b:99999' has a port that is out of range"),
        ({"QUEEN_MESH_PEERS": "[::g]"}, "entry '[::g]' has no IPv6 address in its brackets"),
        ({"QUEEN_MESH_PEERS": "a/b"}, "entry 'a/b' is not host[:port]"),
        ({"QUEEN_TLS_CERT": "c", "QUEEN_TLS_KEY": "k"}, "need QUEEN_HTTP_SERVER=hypercorn"),
        ({"QUEEN_TLS_KEY": "k", "QUEEN_HTTP_SERVER": "hypercorn"}, "go together"),
        ({"QUEEN_MESH_TLS_CERT": "c"}, "the TLS of the mesh is mutual"),
        ({"QUEEN_MESH_TLS_CERT": "c", "QUEEN_MESH_TLS_KEY": "k"}, "the TLS of the mesh is mutual"),
        ({"QUEEN_SYNC_HEARTBEAT_MS": "5000"}, "must be less than QUEEN_SYNC_DEAD_THRESHOLD_MS"),
        ({"QUEEN_MESH_PEERS": "a", "PORT": "6633"}, "are the same port, 6633"),
        ({"JWT_ENABLED": "1"}, "set is none"),
        (
            {"JWT_ENABLED": "1", "JWT_SECRET": "s", "JWT_PUBLIC_KEY": "p"},
            "set is JWT_SECRET, JWT_PUBLIC_KEY",
        ),
        (
            {"JWT_ENABLED": "1", "JWT_ALGORITHM": "RS256", "JWT_SECRET": "s"},
            "JWT_ALGORITHM=RS256 verifies with JWT_PUBLIC_KEY or JWT_JWKS_URL",
        ),
        (
            {"JWT_ENABLED": "1", "JWT_ALGORITHM": "hs256", "JWT_JWKS_URL": "https://i"},
            "JWT_ALGORITHM=HS256 verifies with JWT_SECRET, but JWT_JWKS_URL is set",
        ),
        ({"QUEEN_ADMISSION_MIN": "9", "QUEEN_ADMISSION_MAX": "8"}, "is more than"),
        ({"POP_WAIT_INITIAL_INTERVAL_MS": "1001"}, "is more than POP_WAIT_MAX_INTERVAL_MS (1000)"),
    ],
)
def test_one_fault(environ: dict[str, str], words: str) -> None:
    (fault,) = faults(environ)
    assert words in fault


def test_no_contradiction_is_reported_about_a_value_that_is_broken_already() -> None:
    assert faults({"QUEEN_ADMISSION_MIN": "9", "QUEEN_ADMISSION_MAX": "x"}) == [
        'QUEEN_ADMISSION_MAX="x" is not an integer (1 to 10000)'
    ]


def test_a_default_that_follows_from_a_broken_value_is_no_second_fault() -> None:
    (fault,) = faults({"QUEEN_BIND_ADDR": "a b"})
    assert fault.startswith("QUEEN_BIND_ADDR=")


def test_a_fault_is_one_short_line() -> None:
    for name in ("PORT", "QUEEN_MESH_PEERS"):
        (fault,) = faults({name: "a\nb" + "c" * 1000})
        assert "\n" not in fault
        assert len(fault) < 300


@pytest.mark.parametrize("key", ["abc", "z" * 64, "0" * 63, "0" * 66, "é" * 64])
def test_a_malformed_encryption_key_is_fatal_and_stays_secret(key: str) -> None:
    (fault,) = faults({"QUEEN_ENCRYPTION_KEY": key})
    assert fault == f"QUEEN_ENCRYPTION_KEY=<set:{len(key)} chars> is not 64 hexadecimal digits"


SECRETS = {
    "PG_PASSWORD": "pass-word",
    "JWT_SECRET": "jot-secret",
    "QUEEN_SYNC_SECRET": "sync-secret",
    "QUEEN_ENCRYPTION_KEY": "ab" * 32,
}


def test_secrets_appear_nowhere() -> None:
    config = load(EXTERNAL | SECRETS)
    said = repr(config) + table(config) + repr(list(boot_lines(config)))
    for secret in (*SECRETS.values(), repr(config.security.encryption_key)):
        assert secret not in said
    assert "<set:64 chars>" in said
    assert {name for name, variable in VARIABLES.items() if variable.secret} == {
        *SECRETS,
        "JWT_PUBLIC_KEY",
    }


# Warnings


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"QUEEN_ENCRYPTON_KEY": "k"}, "did you mean QUEEN_ENCRYPTION_KEY?"),
        ({"FILE_BUFFER_DIRECTORY": "k"}, "did you mean FILE_BUFFER_DIR?"),
        ({"PG_USER": "u"}, "PG_USER ignored: PG_HOST is unset"),
        (EXTERNAL | {"QUEEN_PG_BIN": "/b"}, "QUEEN_PG_BIN ignored: PG_HOST is set"),
        (EXTERNAL | {"PG_SSL_ROOT_CERT": "/c"}, "PG_USE_SSL is false"),
        (EXTERNAL | {"DB_POOL_SIZE": "24"}, "the admission band is [8,8]"),
        ({"QUEEN_MESH_PEERS": "a"}, "the mesh is open"),
        ({"QUEEN_SYNC_SECRET": "s"}, "QUEEN_MESH_PEERS is empty"),
    ],
)
def test_one_warning(environ: dict[str, str], words: str) -> None:
    (warning,) = load(environ).warnings
    assert words in warning


@pytest.mark.parametrize(
    "environ",
    [{}, EXTERNAL, {"PATH": "/bin", "PGHOST": "x", "QUEEN_X\n": "y"}, {"DB_POOL_SIZE": "25"}],
)
def test_no_warning(environ: dict[str, str]) -> None:
    assert load(environ).warnings == ()


@pytest.mark.parametrize(
    ("name", "alias", "first", "second"),
    [
        ("PG_DATABASE", "PG_DB", "a", "b"),
        ("QUEEN_MESH_PEERS", "QUEEN_UDP_PEERS", "a:1", "b:2"),
        ("QUEEN_MESH_PORT", "QUEEN_UDP_NOTIFY_PORT", "7001", "7002"),
    ],
)
def test_alias(name: str, alias: str, first: str, second: str) -> None:
    quiet = EXTERNAL | {"QUEEN_SYNC_SECRET": "s", "QUEEN_SYNC_ENABLED": "no"}
    by_name, by_alias = load(quiet | {name: first}), load(quiet | {alias: first})
    assert value_of(by_name, name) == value_of(by_alias, name) != value_of(load(quiet), name)
    both = load(quiet | {name: first, alias: second})
    assert value_of(both, name) == value_of(by_name, name)
    assert f"{name} and its alias {alias} are both set: {name} is used" in both.warnings
    assert load(quiet | {name: "", alias: first}).warnings == by_alias.warnings


# What is derived


@pytest.mark.parametrize(
    ("pool", "flow", "band"),
    [
        (60, {}, (29, 44)),
        (160, {}, (96, 144)),
        (24, {}, (8, 8)),
        (4, {}, (8, 8)),
        (25, {}, (8, 9)),
        (60, {"admission_min": 40}, (40, 44)),
        (60, {"admission_min": 99}, (44, 44)),
        (60, {"admission_max": 35}, (29, 35)),
        (60, {"admission_max": 4}, (4, 4)),
        (60, {"pool_reserve": 0}, (40, 60)),
    ],
)
def test_admission_band(pool: int, flow: dict[str, int], band: tuple[int, int]) -> None:
    assert FlowConfig(**flow).admission_band(pool) == AdmissionBand(*band)


@given(
    pool=st.integers(4, 10_000),
    reserve=st.integers(0, 10_000),
    low=st.none() | st.integers(1, 10_000),
    high=st.none() | st.integers(1, 10_000),
)
def test_the_ends_of_the_band_never_cross(
    pool: int, reserve: int, low: int | None, high: int | None
) -> None:
    flow = FlowConfig(pool_reserve=reserve, admission_min=low, admission_max=high)
    band = flow.admission_band(pool)
    assert 1 <= band.lo <= band.hi <= max(8, pool - reserve)


def test_a_public_key_implies_an_algorithm_that_uses_one() -> None:
    config = load({"JWT_ENABLED": "1", "JWT_JWKS_URL": "https://issuer/keys"})
    assert config.auth.algorithm is JwtAlgorithm.RS256


def test_peers() -> None:
    text = " tcp://a , b:7,[::1],udp://[fe80::1]:9,a,,"
    sync = load({"QUEEN_MESH_PEERS": text, "QUEEN_MESH_PORT": "7000"}).sync
    assert sync.peers == (Peer("a", 7000), Peer("b", 7), Peer("::1", 7000), Peer("fe80::1", 9))


def test_a_port_left_out_and_the_same_port_given_are_one_peer() -> None:
    assert load({"QUEEN_MESH_PEERS": "a,a:6633"}).sync.peers == (Peer("a", 6633),)


# Parsers


@pytest.mark.parametrize("text", FACES_OF_TRUE)
def test_true(text: str) -> None:
    assert Boolean()(text) is True


@pytest.mark.parametrize("text", FACES_OF_FALSE)
def test_false(text: str) -> None:
    assert Boolean()(text) is False


@pytest.mark.parametrize(
    "text", ["1_0", " 1", "1 ", "+1", "1.0", "1e1", "0x1", "", "-", "٣", "1\n"]
)
def test_integers_are_strict(text: str) -> None:
    with pytest.raises(ValueError, match="is not an integer"):
        Integer(0, 100)(text)


@given(st.integers(), st.integers(0, 30))
def test_integers_round_trip_inside_the_range(value: int, zeros: int) -> None:
    parse = Integer(-1000, 1000)
    text = f"{'-' if value < 0 else ''}{'0' * zeros}{abs(value)}"
    if -1000 <= value <= 1000:
        assert parse(text) == value
    else:
        with pytest.raises(ValueError, match=r"is out of range \(-1000 to 1000\)"):
            parse(text)


@given(st.decimals(1, 100, places=3))
def test_decimals_round_trip(value: object) -> None:
    assert Decimal(1, 100)(str(value)) == pytest.approx(float(str(value)))


@given(st.binary(min_size=32, max_size=32), st.booleans())
def test_keys_round_trip(key: bytes, upper: bool) -> None:
    assert HexKey(32)(key.hex().upper() if upper else key.hex()) == key


HOSTS = st.from_regex(r"[a-z0-9](?:[a-z0-9.-]{0,20}[a-z0-9])?", fullmatch=True) | st.ip_addresses(
    v=6
).map(str)
PEERS = st.builds(Peer, HOSTS, st.integers(0, 65535))


@given(st.lists(PEERS, unique=True), st.sampled_from(["", "tcp://", "http://"]))
def test_peers_round_trip(peers: list[Peer], scheme: str) -> None:
    assert PeerList()(",".join(f"{scheme}{peer}" for peer in peers)) == tuple(peers)


@given(st.text())
def test_words_are_taken_as_they_are_or_refused(text: str) -> None:
    try:
        assert Word()(text) == text
    except ValueError:
        assert not text.isprintable() or any(map(str.isspace, text))


NAMES = [*VARIABLES, "PG_DB", "QUEEN_UDP_PEERS", "QUEEN_UDP_NOTIFY_PORT"]
TEXTS = (
    st.text(st.characters(exclude_categories=()))
    | st.integers(-10, 100_000).map(str)
    | st.sampled_from([*FACES_OF_TRUE, *FACES_OF_FALSE, "a:1,b", "[::1]", "all", "hypercorn"])
)


@given(st.dictionaries(st.sampled_from(NAMES) | st.text(), TEXTS, max_size=12))
def test_any_environment_is_a_configuration_or_a_configuration_error(
    environ: dict[str, str],
) -> None:
    try:
        config = load(environ)
    except ConfigError as error:
        faults = error.faults
    else:
        faults = ["none"]
        table(config).encode()
        assert len(list(boot_lines(config))) == 10
    assert faults
    assert not any("\n" in fault for fault in faults)


# What it says


def test_boot_lines() -> None:
    lines = dict(boot_lines(load({"QUEEN_MESH_PEERS": "a,[::1]:7", "QUEEN_SYNC_SECRET": "s" * 32})))
    assert [*lines] == [
        f"config: {section}"
        for section in (
            "server",
            "postgres",
            "pop",
            "auth",
            "sync",
            "flow",
            "jobs",
            "file_buffer",
            "security",
            "logging",
        )
    ]
    sync = lines["config: sync"]
    assert next(iter(sync)) == "auth"
    assert sync["auth"] == "hmac"
    assert sync["peers"] == 2
    assert sync["peer_list"] == "a:6633,[::1]:7"
    assert sync["secret"] == "<set:32 chars>"
    assert lines["config: postgres"]["password"] == "<unset>"
    assert lines["config: flow"]["band_lo"] == 10
    assert lines["config: flow"]["band_hi"] == 16
    assert lines["config: logging"]["log_level"] == "info"
    assert dict(boot_lines(load({})))["config: sync"]["auth"] == "off"


def test_the_table_names_every_variable_once_with_its_value() -> None:
    lines = table(load({"PORT": "7001", "FILE_BUFFER_DIR": "a\nb"})).splitlines()
    rows = {line.split()[0]: line for line in lines[1:] if line and not line.startswith("#")}
    assert rows.keys() == VARIABLES.keys()
    assert rows["PORT"].split()[1:3] == ["6632", "7001"]
    assert '"a\\nb"' in rows["FILE_BUFFER_DIR"]


def test_every_variable_says_what_it_means() -> None:
    for variable in VARIABLES.values():
        assert variable.meaning.endswith(".")
        assert "|" not in variable.meaning


def test_the_reference_page_is_up_to_date() -> None:
    page = REPOSITORY / "docs" / "reference" / "configuration.md"
    assert page.read_text() == reference_page(), "run .ci/docs"


def test_the_environment_is_read_nowhere_else() -> None:
    readers = [
        path.relative_to(REPOSITORY).as_posix()
        for package in ("queen_trio", "protocol")
        for path in (REPOSITORY / package).rglob("*.py")
        if re.search(r"os\.environ|getenv", path.read_text())
    ]
    assert readers == ["queen_trio/config/load.py"]

"""Servers beside a broker, from Debian's packages: HAProxy before it, PgBouncer behind it.

`make servers` downloads and unpacks them into .cache; nothing is installed and no root is needed.
Where that can't be done the tests that ask for one fail and say so; on a system without
Debian's packages they are skipped and say so.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from attrs import evolve

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from queen_trio.store.settings import ConnectionSettings

ROOT = Path(__file__).parent.parent
START_SECONDS = 10.0
STOP_SECONDS = 5.0
NO_DEBIAN = 3


@cache
def unpacked() -> Path:
    """Where the packages are, after a download if need be; raises when they can't be had.

    On a system without Debian's packages the test is skipped, with the reason.
    """
    done = subprocess.run([ROOT / ".ci/servers"], capture_output=True, text=True)
    if done.returncode == NO_DEBIAN:
        pytest.skip(done.stderr.strip())
    if done.returncode:
        raise RuntimeError(
            "HAProxy, PgBouncer and nss_wrapper couldn't be fetched, so what needs them was not"
            f" tested (make servers):\n{done.stdout}{done.stderr}"
        )
    return ROOT / ".cache/servers"


def program(name: str) -> str:
    """The path of one of their programs."""
    return str(unpacked() / "usr/sbin" / name)


def libraries() -> dict[str, str]:
    """The environment in which those programs find what they are linked with."""
    found = {str(path.parent) for path in unpacked().glob("usr/lib/**/*.so*")}
    return {"LD_LIBRARY_PATH": ":".join(sorted(found))}


def hosts_file(path: Path, addresses: Mapping[str, str]) -> dict[str, str]:
    """Write a hosts file; the environment returned makes a process, and its children, obey it."""
    path.write_text("".join(f"{address} {name}\n" for name, address in addresses.items()))
    [wrapper] = unpacked().glob("usr/lib/**/libnss_wrapper.so")
    return {"LD_PRELOAD": str(wrapper), "NSS_WRAPPER_HOSTS": str(path)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str], address: tuple[str, int], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server for the block's time, from when it accepts connections at `address`."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **environment},
        )
    try:
        wait_accepting(process, address, log)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_accepting(process: subprocess.Popen[bytes], address: tuple[str, int], log: Path) -> None:
    """Block until a connection can be made; raises with the server's log if it ends before."""
    until = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < until:
        try:
            socket.create_connection(address, 1).close()
        except OSError:
            time.sleep(0.01)
        else:
            return
    raise AssertionError(f"nobody listens on {address}:\n{log.read_text()}")


@contextmanager
def running_haproxy(
    configuration: str,
    address: tuple[str, int],
    directory: Path,
    environment: Mapping[str, str],
) -> Iterator[subprocess.Popen[bytes]]:
    """Run HAProxy with this configuration, which has it listen at `address`."""
    path = directory / "haproxy.cfg"
    path.write_text(configuration)
    command = [program("haproxy"), "-db", "-f", str(path)]
    environment = {**environment, **libraries()}
    with running(command, environment, address, directory / "haproxy.log") as process:
        yield process


@contextmanager
def running_pgbouncer(
    settings: ConnectionSettings, mode: str, **options: object
) -> Iterator[ConnectionSettings]:
    """Run PgBouncer in this `pool_mode`, all else its defaults; yields how to go through it."""
    port = free_port()
    values = {
        "listen_addr": "127.0.0.1",
        "listen_port": port,
        "unix_socket_dir": "",
        "auth_type": "any",
        "pool_mode": mode,
        **options,
    }
    lines = [
        "[databases]",
        f"* = host={settings.host} port={settings.port} user={settings.user}",
        "[pgbouncer]",
        *(f"{name} = {value}" for name, value in values.items()),
    ]
    with tempfile.TemporaryDirectory(prefix="queen-pgbouncer-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        path = directory / "pgbouncer.ini"
        path.write_text("\n".join(lines) + "\n")
        command = [program("pgbouncer"), str(path)]
        if os.geteuid() == 0:  # which it refuses to stay
            command += ["-u", "nobody"]
        with running(command, libraries(), ("127.0.0.1", port), directory / "log"):
            yield evolve(settings, host="127.0.0.1", port=port)

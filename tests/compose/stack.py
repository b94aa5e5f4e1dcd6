"""Runs a compose file without an engine: each service is a process with an address of its own.

Read from that very file: services, profiles, the order that depends_on wants, images, commands,
environments, volumes, health checks and grace. A service gets an address 127.a.b.n, so that each
has "its" ports, and what namespaces would do is done otherwise:

- names lead to addresses through nss_wrapper, HAProxy asks a name server of ours;
- who would bind to every address binds to its own: QUEEN_BIND_ADDR, HAProxy's `bind *:`, and
  127.0.0.1 in health checks are rewritten so;
- port 6632 becomes a free one: a broker of this machine's own may have it, on every address;
- paths of a container become paths below a temporary directory;
- the image's paths become this checkout's: /app/bin/queen is `python -m queen_trio serve`.

What it can't show: the build, read_only, tmpfs, and published ports.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from tests.brokers import LiveBroker
from tests.cluster import Cluster
from tests.compose.names import name_server
from tests.servers import ROOT, free_port, hosts_file, running_haproxy

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Service = dict[str, Any]

POSTGRES_PORT = 5432
HTTP_PORT = ":6632"
# The Dockerfile's programs, here.
PROGRAMS = {
    "/app/bin/queen": [sys.executable, "-m", "queen_trio", "serve"],
    "/app/venv/bin/python": [sys.executable],
}
# Compose's default.
STOP_GRACE = "10s"


def read_compose(path: Path, variables: Mapping[str, str], port: int = 6632) -> dict[str, Any]:
    """Parse a compose file, anchors and merges included, and put `${NAME:-default}` in.

    `port` takes the place of 6632.
    """

    def interpolate(match: re.Match[str]) -> str:
        return variables.get(match["name"]) or match["default"]

    text = path.read_text().replace(HTTP_PORT, f":{port}")
    text = re.sub(r"\$\{(?P<name>\w+):-(?P<default>[^}]*)\}", interpolate, text)
    document: dict[str, Any] = yaml.safe_load(text)
    return document


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


class Broker(LiveBroker):
    """A broker of the stack, at its own address."""

    def __init__(self, address: str, grace: float, environment: Mapping[str, str]) -> None:
        super().__init__(environment)
        self.address = address
        self.grace = grace

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.port}"

    def configure(self, **environment: str) -> None:
        """Change variables from its next start on."""
        self._environment.update(environment)

    def stop(self) -> int:
        """SIGTERM, and the exit code; an engine would kill it after its grace."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait(self.grace)


class Stack:
    """The services of one compose file; open it with `running_stack`."""

    def __init__(
        self, path: Path, directory: Path, resources: ExitStack, environment: Mapping[str, str]
    ) -> None:
        self.port = free_port()
        document = read_compose(path, {}, self.port)
        self.services: dict[str, Service] = document["services"]
        self.volumes = {name: directory / "volumes" / name for name in document["volumes"]}
        for volume in self.volumes.values():
            volume.mkdir(parents=True)
        self._file_directory = path.parent
        self._directory = directory
        self._resources = resources
        self._overrides = environment
        network = f"127.{random.randint(64, 250)}.{random.randint(1, 250)}"
        self.addresses = {name: f"{network}.{n}" for n, name in enumerate(self.services, 2)}
        self._hosts = hosts_file(directory / "hosts", self.addresses)
        # Only who runs has a name, as with an engine.
        self._running: dict[str, str] = {}
        self._name_server = resources.enter_context(name_server(self._running))
        self.brokers: dict[str, Broker] = {}
        self.cluster: Cluster

    def up(self, *profiles: str) -> None:
        """Start the long-lived services of no profile, and of these, each after what it needs."""
        for name, service in self.services.items():
            wanted = service.get("profiles", [])
            if name != "runner" and (not wanted or set(wanted) & set(profiles)):
                self.start(name)

    def start(self, name: str) -> None:
        """Start a service, first those that it depends on, and wait until it is healthy."""
        if name in self._running:
            return
        service = self.services[name]
        for needed in service.get("depends_on", []):
            self.start(needed)
        self._running[name] = self.addresses[name]
        image: str = service["image"]
        if image.startswith("postgres:"):
            self._start_postgres(name, service)
        elif image.startswith("haproxy:"):
            self._start_haproxy(name, service)
        elif image == "queen-trio:latest":
            self._start_broker(name, service)
        else:
            raise ValueError(f"{name}: no program for the image {image}")
        if "healthcheck" in service:
            self._wait_healthy(name, service["healthcheck"])

    def run(self, name: str) -> subprocess.CompletedProcess[str]:
        """Run a service that ends by itself, as `--exit-code-from` does."""
        service = self.services[name]
        for needed in service.get("depends_on", []):
            self.start(needed)
        return subprocess.run(
            self._command(service),
            env={**_path(), **self._environment(service), **self._hosts},
            capture_output=True,
            text=True,
            timeout=100,
        )

    def url(self, name: str) -> str:
        return f"http://{self.addresses[name]}:{self.port}"

    # -- services --------------------------------------------------------------------------

    def _start_postgres(self, name: str, service: Service) -> None:
        environment = self._environment(service)
        options = dict(a.split("=", 1) for a in service["command"] if "=" in a)
        cluster = Cluster(options, address=self.addresses[name], port=POSTGRES_PORT)
        self._resources.callback(cluster.destroy)
        # As the image has it: passwords over the network, the superuser of POSTGRES_USER.
        (cluster.data / "pg_hba.conf").write_text(
            "local all all trust\nhost all all 127.0.0.0/8 scram-sha-256\n"
        )
        cluster.start()
        user, database = environment["POSTGRES_USER"], environment["POSTGRES_DB"]
        password = environment["POSTGRES_PASSWORD"]
        cluster.execute(f"CREATE ROLE {user} SUPERUSER LOGIN PASSWORD '{password}'")
        cluster.execute(f"CREATE DATABASE {database} OWNER {user}")
        self.cluster = cluster

    def _start_broker(self, name: str, service: Service) -> None:
        if service["command"] != ["/app/bin/queen"]:
            raise ValueError(f"{name}: not the command of the image: {service['command']}")
        address = self.addresses[name]
        environment = {
            **self._environment(service),
            **self._overrides,
            **self._hosts,
            "QUEEN_BIND_ADDR": address,
            "PORT": str(self.port),
        }
        grace = seconds(service.get("stop_grace_period", STOP_GRACE))
        broker = Broker(address, grace, environment)
        self.brokers[name] = broker
        self._resources.callback(_kill, broker)
        broker.start()

    def _start_haproxy(self, name: str, service: Service) -> None:
        path = Path(self._mounts(service)["/usr/local/etc/haproxy/haproxy.cfg"])
        configuration = path.read_text().replace(HTTP_PORT, f":{self.port}")
        address = self.addresses[name]
        server, port = self._name_server
        replacements = {
            "bind *:": f"bind {address}:",
            "parse-resolv-conf": f"nameserver compose {server}:{port}",
        }
        for old, new in replacements.items():
            if configuration.count(old) != 1:
                raise ValueError(f"haproxy.cfg has not exactly one {old!r}")
            configuration = configuration.replace(old, new)
        directory = self._directory / name
        directory.mkdir()
        names = hosts_file(directory / "hosts", self._running)
        self._resources.enter_context(
            running_haproxy(configuration, (address, self.port), directory, names)
        )

    # -- what compose makes of a service ---------------------------------------------------

    def _mounts(self, service: Service) -> dict[str, str]:
        """Path in the container to path here."""
        mounts = {}
        for volume in service.get("volumes", []):
            source, target = volume.split(":")[:2]
            named = self.volumes.get(source)
            mounts[target] = str(self._file_directory / source if named is None else named)
        return mounts

    def _environment(self, service: Service) -> dict[str, str]:
        mounts = self._mounts(service)
        given: dict[str, Any] = service.get("environment", {})
        if wrong := [value for value in given.values() if not isinstance(value, str)]:
            raise ValueError(f"YAML reads these as no strings: {wrong}")
        return {key: mounts.get(value, value) for key, value in given.items()}

    def _command(self, service: Service) -> list[str]:
        mounts = self._mounts(service)
        first, *rest = service["command"]
        return [*PROGRAMS[first], *(mounts.get(argument, argument) for argument in rest)]

    def _wait_healthy(self, name: str, check: Service) -> None:
        kind, *test = check["test"]
        arguments = shlex.split(test[0]) if kind == "CMD-SHELL" else test
        command = [
            *PROGRAMS.get(arguments[0], [arguments[0]]),
            *(a.replace("127.0.0.1", self.addresses[name]) for a in arguments[1:]),
        ]
        environment = {**_path(str(self.cluster.binaries)), "PGHOST": self.addresses[name]}
        said = ""
        for _ in range(check["retries"]):
            done = subprocess.run(
                command,
                env=environment,
                timeout=seconds(check["timeout"]),
                capture_output=True,
                text=True,
            )
            if done.returncode == 0:
                return
            said = done.stdout + done.stderr
            time.sleep(seconds(check["interval"]) / 20)  # tests have less patience
        raise AssertionError(f"{name} never got healthy: {said}")


def _path(*first: str) -> dict[str, str]:
    return {"PATH": ":".join((*first, os.environ["PATH"]))} | {
        name: value for name, value in os.environ.items() if name in ("PYTHONPATH", "HOME")
    }


def _kill(broker: Broker) -> None:
    if broker.process.poll() is None:
        broker.kill()


@contextmanager
def running_stack(
    file: str, *profiles: str, environment: Mapping[str, str] | None = None
) -> Iterator[Stack]:
    """Run `compose/FILE` for the block's time; `environment` goes over that of the brokers."""
    directory = Path(tempfile.mkdtemp(prefix="queen-compose-"))
    try:
        with ExitStack() as resources:
            stack = Stack(ROOT / "compose" / file, directory, resources, environment or {})
            stack.up(*profiles)
            yield stack
    finally:
        shutil.rmtree(directory)

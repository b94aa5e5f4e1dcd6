"""What is installed somewhere else is a whole broker; `.ci/wheel` runs this for the wheel."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from tests.brokers import postgres_environment, running_broker
from tests.cluster import running_cluster
from tests.http.api import data, open_api

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from tests.brokers import LiveBroker

ROOT = Path(__file__).parent.parent


def missing_from(wheel: Path) -> set[str]:
    """Which of our files the wheel lacks: modules, SQL, the API's document."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    wanted = {f"queen_trio/_sql/{p.relative_to(ROOT / 'sql')}" for p in ROOT.glob("sql/**/*.sql")}
    wanted |= {str(p.relative_to(ROOT)) for p in ROOT.glob("queen_trio/**/*.py")}
    wanted |= {str(p.relative_to(ROOT / "protocol")) for p in ROOT.glob("protocol/*/*.py")}
    wanted |= {f"queen_trio/http/openapi.{suffix}" for suffix in ("json", "yaml")}
    return wanted - names


def running_command(
    command: Sequence[str], environment: Mapping[str, str], directory: Path
) -> AbstractContextManager[LiveBroker]:
    """Run a broker by that command, which can't see this checkout, for the block's time."""
    apart = {**environment, "PYTHONPATH": "", "FILE_BUFFER_DIR": str(directory)}
    return running_broker(apart, command)


async def check_serves(broker: LiveBroker) -> None:
    """Push, pop, and read the API's document, which is a file of the package."""
    with trio.fail_after(10):
        async with open_api(broker) as api:
            await api.push("q", "through it")
            assert data(await api.pop("q")) == ["through it"]
            assert (await api.http.get("/openapi.json")).status_code == 200


def main() -> None:
    command, wheel = sys.argv[1], Path(sys.argv[2])
    if missing := missing_from(wheel):
        sys.exit(f"{wheel.name} lacks {', '.join(sorted(missing))}")
    with running_cluster() as cluster:
        environment = postgres_environment(cluster.settings())
        spool = cluster.directory / "spool"
        with running_command([command, "serve"], environment, spool) as broker:
            trio.run(check_serves, broker)
            if code := broker.stop():
                sys.exit(f"the broker of {wheel.name} stopped with {code}")
    print(f"{wheel.name} is a broker")


if __name__ == "__main__":
    main()

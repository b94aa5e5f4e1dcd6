"""The manifests: valid, the seed's own but for the image, and consistent among themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from queen_trio.config import load

ROOT = Path(__file__).parent.parent.parent
OUR_IMAGE = "queen-trio:latest"
# PostgreSQL keeps these for superusers.
RESERVED_CONNECTIONS = 3
Object = dict[str, Any]


def read(path: str) -> list[Object]:
    return list(yaml.safe_load_all((ROOT / path).read_text()))


OBJECTS = read("compose/kubernetes.yaml")


def one(kind: str) -> Object:
    [found] = [o for o in OBJECTS if o["kind"] == kind]
    return found


def container() -> Object:
    [found] = one("StatefulSet")["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def environment() -> dict[str, str]:
    """The variables of the first pod."""
    sources = {"secretKeyRef": "from a secret", "fieldRef": "queen-0"}
    return {
        v["name"]: v["value"] if "value" in v else sources[next(iter(v["valueFrom"]))]
        for v in container()["env"]
    }


@pytest.mark.parametrize("version", ["1.25", "1.30", kubernetes_validate.latest_version()])
@pytest.mark.parametrize("manifest", OBJECTS, ids=lambda o: f"{o['kind']}-{o['metadata']['name']}")
def test_manifests_are_valid(manifest: Object, version: str) -> None:
    """Against the schemas of the oldest and the newest release that the package knows, strictly."""
    kubernetes_validate.validate(manifest, version, strict=True)


def test_a_wrong_manifest_is_noticed() -> None:
    wrong = {**OBJECTS[0], "spec": {**OBJECTS[0]["spec"], "prots": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)


def test_the_manifest_is_the_seeds_but_for_the_image() -> None:
    prescribed = read("tests/deploy/manifest.yaml")
    [image] = [
        c for o in prescribed if o["kind"] == "StatefulSet"
        for c in o["spec"]["template"]["spec"]["containers"]
    ]  # fmt: skip
    image["image"] = OUR_IMAGE
    assert OBJECTS[: len(prescribed)] == prescribed
    assert [o["kind"] for o in OBJECTS[len(prescribed) :]] == [
        "NetworkPolicy",
        "PodDisruptionBudget",
    ]


def test_a_broker_understands_its_environment() -> None:
    config = load(environment())
    assert config.warnings == ()
    assert config.sync.auth == "hmac"
    assert config.sync.replicas == one("StatefulSet")["spec"]["replicas"]
    assert (config.admission_band.lo, config.admission_band.hi) == (29, 44)
    pod = one("StatefulSet")["spec"]["template"]["spec"]
    assert config.server.shutdown_timeout_ms / 1000 < pod["terminationGracePeriodSeconds"]
    assert config.pop.default_timeout_ms / 1000 < pod["terminationGracePeriodSeconds"]


def test_only_brokers_reach_the_mesh() -> None:
    rules = one("NetworkPolicy")["spec"]["ingress"]
    [mesh] = [rule for rule in rules if any(p["port"] == 6633 for p in rule["ports"])]
    assert mesh["from"] == [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "queen"}}}]
    assert all(p["protocol"] == "TCP" for rule in rules for p in rule["ports"])
    client = next(o for o in OBJECTS if o["metadata"]["name"] == "queen")
    assert [p["name"] for p in client["spec"]["ports"]] == ["http"]


def test_the_database_of_the_example_fits() -> None:
    """CloudNativePG's own schema is in no package: what the brokers rely on is checked here."""
    [cluster] = read("compose/cloudnativepg.yaml")
    spec = cluster["spec"]
    connections = int(spec["postgresql"]["parameters"]["max_connections"])
    config = load(environment())
    assert config.sync.replicas * config.postgres.pool_size <= connections - RESERVED_CONNECTIONS
    assert connections >= 200
    initdb = spec["bootstrap"]["initdb"]
    assert (initdb["database"], initdb["owner"]) == (config.postgres.database, config.postgres.user)
    [service] = spec["managed"]["services"]["additional"]
    assert service["selectorType"] == "rw"
    assert service["serviceTemplate"]["metadata"]["name"] == config.postgres.host

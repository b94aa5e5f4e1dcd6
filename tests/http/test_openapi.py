"""The OpenAPI document: as complete as the route table, and true of a live broker."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from queen_trio.http import app
from queen_trio.http.auth import ROUTE_ACCESS
from queen_trio.model.queue import COLUMNS

if TYPE_CHECKING:
    from tests.http.api import Api

ROOT = Path(__file__).parents[2]
METHODS = {"get", "post", "put", "patch", "delete"}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    text = (ROOT / "queen_trio/http/openapi.yaml").read_text()
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def template(path: str) -> str:
    """A path of the route table as OpenAPI writes it."""
    return re.sub(r":(\w+)", r"{\1}", path)


def operations(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Each operation with the parameters of its path added to its own."""
    return {
        (path, method): {
            **item[method],
            "parameters": item.get("parameters", []) + item[method].get("parameters", []),
        }
        for path, item in document["paths"].items()
        for method in item
        if method in METHODS
    }


def test_every_route_is_described_and_no_other(document: dict[str, Any]) -> None:
    served = {
        (template(path), method.lower())
        for path, methods in app._ROUTES.items()
        for method in methods
        if method != "HEAD"
    }
    assert set(operations(document)) == served


def test_every_variable_of_a_path_is_a_parameter(document: dict[str, Any]) -> None:
    for (path, method), operation in operations(document).items():
        parameters = [
            document["components"]["parameters"][parameter["$ref"].rpartition("/")[2]]
            if "$ref" in parameter
            else parameter
            for parameter in operation["parameters"]
        ]
        named = [parameter["name"] for parameter in parameters if parameter["in"] == "path"]
        assert sorted(named) == sorted(re.findall(r"{(\w+)}", path)), (path, method)


def test_the_roles_are_those_of_the_table(document: dict[str, Any]) -> None:
    described = operations(document)
    for path, methods in ROUTE_ACCESS.items():
        for method, access in methods.items():
            operation = described[template(path), method.lower()]
            assert sorted(operation["x-roles"]) == sorted(role.value for role in access.roles), path
            assert (operation.get("security") == [{}]) == (not access.roles), path


def test_every_option_of_a_queue_is_described(document: dict[str, Any]) -> None:
    for schema in ("Options", "OptionsGiven"):
        assert set(document["components"]["schemas"][schema]["properties"]) == set(COLUMNS)


def test_names_and_references_hold(document: dict[str, Any]) -> None:
    ids = [operation["operationId"] for operation in operations(document).values()]
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'"#/components/(\w+/\w+)"', json.dumps(document)))
    there = {
        f"{section}/{name}"
        for section, entries in document["components"].items()
        for name in entries
        if section != "securitySchemes"
    }
    assert used == there


def test_what_is_generated_from_it_is_current() -> None:
    subprocess.run([sys.executable, ".ci/http_docs.py", "--check"], cwd=ROOT, check=True)


async def test_the_broker_serves_it(api: Api, document: dict[str, Any]) -> None:
    response = await api.http.get("/openapi.json")
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.json()["paths"] == document["paths"]

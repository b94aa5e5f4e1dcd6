"""U+0000, which PostgreSQL can't hold, in every place of every request that takes a string."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.http.api import Api

DOCUMENT: Final = json.loads(
    (Path(__file__).parents[2] / "queen_trio/http/openapi.json").read_text()
)
NUL: Final = "a\0b"
UUID: Final = "00000000-0000-7000-8000-000000000000"


def resolved(schema: Any) -> Any:
    while "$ref" in schema:
        section, name = schema["$ref"].split("/")[2:]
        schema = DOCUMENT["components"][section][name]
    return schema


def value(schema: Any) -> Any:
    """Something that fits a schema."""
    schema = resolved(schema)
    schema = resolved(schema.get("anyOf", [schema])[0])
    if "enum" in schema or "const" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    kinds = schema.get("type", "string")  # any JSON value
    kind = kinds[0] if isinstance(kinds, list) else kinds
    if kind == "object":
        return {key: value(part) for key, part in schema.get("properties", {}).items()}
    if kind == "array":
        return [value(schema["items"])]
    if kind == "string":
        formats = {"uuid": UUID, "date-time": "2026-01-01T00:00:00Z"}
        return formats.get(schema.get("format"), "nul")
    return {"integer": 1, "number": 1.0, "boolean": False, "null": None}[kind]


def with_nul(data: Any) -> Iterator[Any]:
    """The data with one of its strings replaced, for each of them."""
    if isinstance(data, str):
        yield NUL
    elif isinstance(data, list):
        for index, entry in enumerate(data):
            for changed in with_nul(entry):
                yield [*data[:index], changed, *data[index + 1 :]]
    elif isinstance(data, dict):
        for key, entry in data.items():
            for changed in with_nul(entry):
                yield {**data, key: changed}


def operations() -> Iterator[tuple[str, str]]:
    for path, item in DOCUMENT["paths"].items():
        for method in item.keys() & {"get", "post", "delete"}:
            yield method, path


@pytest.mark.parametrize(("method", "path"), sorted(operations()))
async def test_nul_is_never_our_fault(api: Api, method: str, path: str) -> None:
    item = DOCUMENT["paths"][path]
    operation = item[method]
    parameters = [
        resolved(parameter)
        for parameter in item.get("parameters", []) + operation.get("parameters", [])
    ]
    variables, query = (
        {p["name"]: value(p["schema"]) for p in parameters if p["in"] == place}
        for place in ("path", "query")
    )
    body = None
    if "requestBody" in operation:
        body = value(operation["requestBody"]["content"]["application/json"]["schema"])
    requests = [
        *((changed, query, body) for changed in with_nul(variables)),
        *((variables, {changed: NUL}, body) for changed, old in query.items() if old == "nul"),
        *((variables, query, changed) for changed in with_nul(body)),
    ]
    for path_values, query_values, body_value in requests:
        where = path
        for name, text in path_values.items():
            where = where.replace(f"{{{name}}}", text.replace("\0", "%00"))
        response = await api.http.request(method, where, params=query_values, json=body_value)
        assert response.status_code < 500, (path_values, query_values, body_value, response.text)

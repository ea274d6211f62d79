"""The description of the API in OpenAPI 3.1, made from the declarations of the endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from graphile_worker import __version__
from graphile_worker.web.models import Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphile_worker.web.api.routes import Endpoint

_REFERENCE = "#/components/schemas/{name}"
_PROBLEMS = {
    "400": "The request is invalid.",
    "401": "It is not known who the request is from.",
    "403": "The user may not do this, the dashboard is read-only, or another site has sent the request.",
    "404": "There is no such thing.",
    "409": "Another number of jobs matches than expected, or a middleware did not add the job.",
    "413": "The body is too large.",
    "429": "Too many operations are running.",
    "503": "The database cannot be used, or the query took too long.",
}
_FOR_CHANGES = {"409", "413", "429"}
_DESCRIPTION = (
    "The jobs of one schema. Ids are strings. Payloads are as they are stored, to the last digit. Errors are "
    "problem documents (RFC 9457), with a word for programs in `code`. Send a token as "
    "`Authorization: Bearer`."
)


def describe(endpoints: Sequence[Endpoint], root: str) -> dict[str, Any]:
    """Return the document."""
    types: list[Any] = [Problem]
    for one in endpoints:
        types += [kind for kind in (one.query, one.body, *one.answers) if kind is not None]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    known = {id(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths: dict[str, Any] = {}
    for one in endpoints:
        item = paths.setdefault(one.path.replace(":path}", "}"), {})
        item[one.method.lower()] = _describe_operation(one, known, components)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Graphile Worker", "version": __version__, "description": _DESCRIPTION},
        "servers": [{"url": f"{root}/api/v1"}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "basic": {"type": "http", "scheme": "basic"},
            },
        },
        "security": [{"bearer": []}, {"basic": []}],
    }


def _describe_operation(one: Endpoint, known: dict[int, Any], components: dict[str, Any]) -> dict[str, Any]:
    responses: dict[str, Any] = {
        str(status): {
            "description": "Success." if status < 202 else "It goes on in the background.",  # noqa: PLR2004
            "content": {one.media_type: {"schema": _schema_of(one, known)}},
        }
        for status in one.statuses
    }
    problem = {"application/problem+json": {"schema": known[id(Problem)]}}
    for status, text in _PROBLEMS.items():
        if one.method != "GET" or status not in _FOR_CHANGES:
            responses[status] = {"description": text, "content": problem}
    described: dict[str, Any] = {
        "operationId": one.name,
        "summary": one.summary,
        "parameters": [*_path_parameters(one), *_query_parameters(one, components)],
        "responses": responses,
    }
    if one.body is not None:
        content = {"application/json": {"schema": known[id(one.body)]}}
        described["requestBody"] = {"required": one.needs_body, "content": content}
    return described


def _schema_of(one: Endpoint, known: dict[int, Any]) -> dict[str, Any]:
    schemas: list[dict[str, Any]] = [known[id(kind)] for kind in one.answers]
    return {"anyOf": schemas} if len(schemas) > 1 else {**(schemas[0] if schemas else {})}


def _path_parameters(one: Endpoint) -> list[dict[str, Any]]:
    names = [part[1:-1].partition(":")[0] for part in one.path.split("/") if part.startswith("{")]
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in names
    ]


def _query_parameters(one: Endpoint, components: dict[str, Any]) -> list[dict[str, Any]]:
    if one.query is None:
        return []
    schema = components[one.query.__name__]
    found = []
    for name, declared in schema.get("properties", {}).items():
        # A parameter that is left out is None; no text stands for it.
        kinds = [kind for kind in declared.get("anyOf", [declared]) if kind != {"type": "null"}]
        cleaned = {key: value for key, value in declared.items() if key not in {"anyOf", "default"}}
        described = {**cleaned, **(kinds[0] if len(kinds) == 1 else {"anyOf": kinds})}
        found.append(
            {
                "name": name,
                "in": "query",
                "required": name in schema.get("required", []),
                "schema": described,
            }
        )
    return found

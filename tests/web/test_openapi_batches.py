"""What the OpenAPI document says of batches is what they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from gateway.batches.batch_registry import BatchProgress
from gateway.batches.batch_rows import Batch
from gateway.batches.request_rows import BatchState
from gateway.web.batches import batch_object
from gateway.web.message_batches import message_batch_object
from gateway.web.openapi_batches import BATCH_SCHEMAS, BATCH_STATUSES, BATCH_SUMMARIES
from gateway.web.site import SITE_ROUTES

BATCH = Batch(
    "batch_1", "key", "openai", "/v1/embeddings", "file-1", 10.0, 86410.0, 9e9, "folder",
    total=3, completed=1, failed=1, metadata={"a": "b"},
)  # fmt: skip


def check(name: str, value: dict[str, Any]) -> None:
    schema = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": BATCH_SCHEMAS}}
    jsonschema.validate(value, schema)
    assert set(value) <= set(BATCH_SCHEMAS[name]["properties"])
    assert set(value["llama_gateway"]) == set(BATCH_SCHEMAS["BatchProgress"]["properties"])


@pytest.mark.parametrize("state", list(BatchState))
def test_objects_of_every_state_are_as_the_document_says(state: BatchState) -> None:
    batch = replace(BATCH, state=state, ended_at=20.5 if state.ended else None, paused_at=15.0)
    for progress in (None, BatchProgress(1, 1, 2.5, 99.5, 0.1, 0.3)):
        check("Batch", batch_object(batch, progress))
        check("MessageBatch", message_batch_object(batch, progress, None))


def test_every_path_of_batches_is_described() -> None:
    routed = {
        route.path if route.method == "GET" else f"{route.method} {route.path}"
        for route in SITE_ROUTES
        if "batches" in route.path
    }
    assert routed == set(BATCH_SUMMARIES) == set(BATCH_STATUSES)

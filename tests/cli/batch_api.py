"""A small server of `/v1/files` and `/v1/batches`, whose answers a test can change or lose."""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.cli.local_server import Answer, answering

NOW = 1_790_000_000


class BatchApi:
    """Runs a batch by some lines each time that it is asked for; lines with `FAIL` fail."""

    def __init__(self) -> None:
        self.key: str | None = None
        self.lines_per_look = 1000
        self.files: dict[str, tuple[str, bytes]] = {}
        self.batches: dict[str, dict[str, Any]] = {}
        self.by_key: dict[str, str] = {}
        self.requests: list[str] = []
        self.lost_answers: list[str] = []
        """Requests (`POST /v1/batches`) that are done and not answered, each once."""
        self.refusals: list[tuple[int, dict[str, str], str]] = []
        """Status, header fields and message of the next answers, whatever is asked."""
        self.on_look: Callable[[], None] = lambda: None
        self.url = ""

    def answer(self, method: str, target: str, headers: Any, body: bytes) -> tuple[int, Any]:
        path = target.partition("?")[0]
        if self.key is not None and headers.get("authorization") != f"Bearer {self.key}":
            return 401, failure("No valid API key was sent.", "invalid_api_key")
        match path.split("/")[2:]:
            case ["files"] if method == "POST":
                return 200, self.upload(headers["content-type"], body)
            case ["files"]:
                return 200, {"data": [self.file(id_) for id_ in reversed(self.files)]}
            case ["files", id_, "content"] if id_ in self.files:
                return 200, self.files[id_][1]
            case ["batches"] if method == "POST":
                return self.create(json.loads(body), headers["idempotency-key"])
            case ["batches"]:
                found = list(reversed(self.batches.values()))
                return 200, {"object": "list", "data": found, "has_more": False}
            case ["batches", id_, *action] if id_ in self.batches:
                return self.about(self.batches[id_], "".join(action))
            case ["batches", id_, *_]:
                return 404, failure(f"No batch found with id '{id_}'.")
        return 404, failure(f"There is no {path}.")

    def upload(self, content_type: str, body: bytes) -> dict[str, Any]:
        boundary = content_type.partition("boundary=")[2].encode()
        parts = {}
        for part in body.split(b"--" + boundary)[1:-1]:
            head, _, content = part.partition(b"\r\n\r\n")
            found = re.search(rb'name="([^"]*)"(?:; filename="([^"]*)")?', head)
            assert found is not None
            parts[found[1].decode()] = (found[2], content[:-2])
        assert parts["purpose"][1] == b"batch"
        id_ = f"file-{len(self.files)}"
        self.files[id_] = (parts["file"][0].decode(), parts["file"][1])
        return self.file(id_)

    def file(self, id_: str) -> dict[str, Any]:
        name, content = self.files[id_]
        return {"id": id_, "object": "file", "filename": name, "bytes": len(content)}

    def create(self, fields: dict[str, Any], key: str) -> tuple[int, Any]:
        if key in self.by_key:
            earlier = self.batches[self.by_key[key]]
            if earlier["input_file_id"] != fields["input_file_id"]:
                return 409, failure("Another request had this key.", "idempotency_conflict")
            return 200, earlier
        id_ = f"batch_{len(self.batches)}"
        self.by_key[key] = id_
        total = len(self.files[fields["input_file_id"]][1].splitlines())
        self.batches[id_] = {
            "id": id_, "object": "batch", "status": "validating", "errors": None,
            "output_file_id": None, "error_file_id": None, "metadata": None,
            "created_at": NOW, "expires_at": NOW + 86_400,
            "request_counts": {"total": total, "completed": 0, "failed": 0},
            "llama_gateway": {
                "waiting": total, "running": 0, "tokens_per_second": 55.0,
                "expected_end": NOW + 60, "cost": 0.25, "expected_cost": 0.5, "paused": None
            },
            **fields,
        }  # fmt: skip
        return 200, self.batches[id_]

    def about(self, batch: dict[str, Any], action: str) -> tuple[int, Any]:
        own, ended = batch["llama_gateway"], batch["status"] in {"completed", "cancelled"}
        match action:
            case "cancel" if ended:
                return 409, failure(f"Cannot cancel a batch with status '{batch['status']}'.")
            case "cancel":
                batch["status"] = "cancelled"
            case "pause":
                own["paused"] = {"at": NOW, "reason": "by its owner"}
            case "resume":
                own["paused"] = None
            case "output" | "errors":
                return 200, self.lines(batch)[action == "errors"]
            case "":
                self.on_look()
                if not ended and own["paused"] is None:
                    self.go_on(batch)
        return 200, batch

    def go_on(self, batch: dict[str, Any]) -> None:
        counts = batch["request_counts"]
        batch["status"] = "in_progress"
        ended = counts["completed"] + counts["failed"] + self.lines_per_look
        lines = self.files[batch["input_file_id"]][1].splitlines()[:ended]
        counts["failed"] = sum(b"FAIL" in line for line in lines)
        counts["completed"] = len(lines) - counts["failed"]
        if len(lines) == counts["total"]:
            batch["status"] = "completed"
            for name, content in zip(
                ("output_file_id", "error_file_id"), self.lines(batch), strict=True
            ):
                if content:
                    batch[name] = f"file-{len(self.files)}"
                    self.files[batch[name]] = (name, content)

    def lines(self, batch: dict[str, Any]) -> tuple[bytes, bytes]:
        output, errors = b"", b""
        counts = batch["request_counts"]
        ended = counts["completed"] + counts["failed"]
        for number, data in enumerate(self.files[batch["input_file_id"]][1].splitlines()[:ended]):
            line = json.loads(data)
            common = {"id": f"batch_req_0_{number + 1}", "custom_id": line["custom_id"]}
            if b"FAIL" in data:
                body = {"error": {"message": "It failed.", "code": "node_failed"}}
                response = {"status_code": 502, "request_id": "r", "body": body}
                errors += dumped({**common, "response": response, "error": None})
            else:
                prompt = line["body"]["messages"][-1]["content"]
                choice = {"index": 0, "message": {"role": "assistant", "content": f"re: {prompt}"}}
                response = {"status_code": 200, "request_id": "r", "body": {"choices": [choice]}}
                output += dumped({**common, "response": response, "error": None})
        return output, errors


def dumped(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def failure(message: str, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "code": code}}


@contextmanager
def batch_api(tls: ssl.SSLContext | None = None) -> Iterator[BatchApi]:
    api = BatchApi()

    def answer(request: BaseHTTPRequestHandler, body: bytes) -> Answer | None:
        called = f"{request.command} {request.path}"
        api.requests.append(called)
        if api.refusals:
            status, fields, message = api.refusals.pop(0)
            return status, fields, failure(message)
        status, value = api.answer(request.command, request.path, request.headers, body)
        if called in api.lost_answers:
            api.lost_answers.remove(called)
            return None
        return status, {}, value

    with answering(answer, tls) as api.url:
        yield api

"""`make fuzz ARGS="--only api --runs 50000"`: requests by the OpenAPI document, made by schemathesis.

A gateway process serves over two emulated nodes, with keys on both listeners. Every operation of
both gets requests that fit the document and requests that do not. A response must be as the
document says: status, content type, header fields, body. No response is 500, none takes longer
than a minute, no turn of the event loop more than 50 ms of CPU time, and afterwards the process has
the descriptors and about the memory that it had once it was warm.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import requests

from gateway.callers.keys import new_key
from tests.emulator import EmulatedNode
from tests.gateway_processes import serving
from tests.loop_watch.plugin import Children, table
from tests.loop_watch.plugin import environment as watched
from tests.loop_watch.plugin import problems as problems_of

CASES = 50_000

ENDLESS = frozenset({"/admin/live"})
# A response of these never ends by itself: tests/admin/test_live_feed.py.
HANG_SECONDS = 60.0

CASES_PER_TURN = 20
"""Cases of one operation before the next one has its turn."""

WARM_SHARE = 0.2
"""Part of a run after which memory is measured for the first time."""

MOST_GROWTH_MB = 40.0
"""Resident memory that may come on top from then on; caches fill, and the ledger has its cache."""

MOST_FAILURES = 20


@dataclass(frozen=True, slots=True)
class Site:
    """A gateway that runs."""

    url: str
    admin_url: str
    keys: Mapping[str, str]
    """Of both listeners: `right`, `limited` (a viewer's at the admin listener), `wrong`."""
    process: psutil.Process


@dataclass(frozen=True, slots=True)
class Measured:
    """The gateway's process at one moment."""

    rss_mb: float
    descriptors: int

    @classmethod
    def of(cls, process: psutil.Process) -> Measured:
        return cls(round(process.memory_info().rss / 1e6, 1), process.num_fds())


@asynccontextmanager
async def running_site(folder: Path) -> AsyncIterator[Site]:
    """A gateway process over two emulated nodes."""
    keys = {name: new_key(name) for name in ("right", "limited")}
    right, limited = ({"id": key.id, "sha256": key.sha256} for key in keys.values())
    limits = {"tpm": 20_000, "concurrency": 1, "prompt_tokens": 100, "completion_tokens": 5}
    settings = {
        "keys": [
            {**right, "max_class": "urgent", "trust_user_headers": True},
            {**limited, "models": ["alias"], "max_class": "batch", "limits": limits},
        ],
        "admin": {"port": 0, "keys": [{**right, "role": "admin"}, {**limited, "role": "viewer"}]},
        "ollama": True,
        "queue": {"max_wait": 5},
        "shutdown": {"grace": 2},
        "models": {"alias": {"use": "demo"}},
        "logging": {"access": False},
    }
    more: dict[str, Any] = {"answer_tokens": 6, "embeddings": True, "rerank": True, "infill": True}
    async with EmulatedNode(slots=4, **more) as one, EmulatedNode(slots=8, **more) as other:
        nodes = [{"name": f"node-{n}", "url": node.url} for n, node in enumerate((one, other))]
        (folder / "loop").mkdir()
        environment = watched(folder / "loop", str(Path.cwd()))
        async with serving(
            folder / "gateway", nodes, settings=settings, environment=environment
        ) as line:
            texts = {name: key.text for name, key in keys.items()} | {
                "wrong": new_key("right").text
            }
            yield Site(line.url, line.admin_url, texts, psutil.Process(line.first.pid))
            assert line.first.returncode is None, "the gateway's process has ended"
    wrong = [one for one in line.lines if one.get("level") == "error" or "Traceback" in str(one)]
    assert not wrong, wrong[0]


class Fuzzer:
    """Sends cases of all operations of one document."""

    def __init__(self, site: Site, document: dict[str, Any], seed: int) -> None:
        import schemathesis
        from schemathesis.specs.openapi import checks

        self._site = site
        self._rng = random.Random(seed)
        self._session = requests.Session()
        self._session.trust_env = False
        self._checks = [
            checks.status_code_conformance,
            checks.content_type_conformance,
            checks.response_headers_conformance,
            checks.response_schema_conformance,
        ]
        schema: Any = schemathesis.openapi.from_dict(document)
        operations = [found.ok() for found in schema.get_all_operations()]
        self._operations = [one for one in operations if one.path not in ENDLESS]
        self.cases = 0
        self.statuses: Counter[str] = Counter()
        """Responses by listener and status."""
        self.failures: dict[str, str] = {}
        """The first of each kind."""

    def run(self, credentials: tuple[str, ...], cases: float, seconds: float) -> None:
        """Send boundary cases with each of these credentials, and random ones for what is left."""
        until, most = time.monotonic() + seconds, self.cases + int(cases)

        def left() -> int:
            over = time.monotonic() > until or len(self.failures) > MOST_FAILURES
            return 0 if over else most - self.cases

        for name, operation in itertools.product(credentials, self._operations):
            if left() > 0:
                self._send_boundary_cases(operation, name, left())
        for operation in itertools.cycle(self._operations):
            if left() <= 0:
                return
            self._turn(operation, min(CASES_PER_TURN, left()))

    def _send_boundary_cases(self, operation: Any, credentials: str, count: int) -> None:
        """Send up to `count` cases at the boundaries of each parameter and field."""
        from schemathesis import GenerationMode

        schema = operation.schema
        cases = schema.iter_coverage_cases(
            operation,
            generation_modes=list(GenerationMode),
            generation_config=schema.config.generation_for(operation=operation),
        )
        for case in itertools.islice(cases, count):
            try:
                self._send(case, operation, credentials)
            except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - it is a finding
                self._add_failure(operation, error)

    def _turn(self, operation: Any, count: int) -> None:
        """Send up to `count` random cases of one operation."""
        import hypothesis
        from hypothesis import HealthCheck, Phase
        from schemathesis import GenerationMode

        modes = list(GenerationMode)
        named = {"path_parameters": _names(operation.path)} if "{" in operation.path else {}
        strategy = operation.as_strategy(
            self._rng.choice(modes), **(named if self._rng.random() < 0.4 else {})
        )

        @hypothesis.seed(self._rng.getrandbits(32))
        @hypothesis.settings(
            max_examples=count,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            verbosity=hypothesis.Verbosity.quiet,
        )
        @hypothesis.given(strategy)
        def send(case: Any) -> None:
            self._send(case, operation, "none" if self._rng.random() < 0.05 else "right")

        try:
            send()
        except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001 - it is a finding
            if not _has_nothing_wrong(error):
                self._add_failure(operation, error)

    def _add_failure(self, operation: Any, error: BaseException) -> None:
        problems = getattr(error, "exceptions", [error])
        text = " | ".join(f"{one}"[:1500] for one in problems)
        kind = f"{operation.label}: {text.partition(chr(10))[0]}"
        self.failures.setdefault(kind, f"{operation.label}: {text}")

    def _send(self, case: Any, operation: Any, credentials: str) -> None:
        site, is_admin = self._site, "admin" in (operation.tags or ())
        base, key = site.admin_url if is_admin else site.url, site.keys.get(credentials)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.cases += 1
        if self._rng.random() < 0.8 and case.headers is not None:
            # Boundaries of it are far below a second: most requests would end while they wait.
            case.headers.pop("X-Request-Timeout", None)
        response = case.call(
            base_url=base, session=self._session, headers=headers, timeout=HANG_SECONDS
        )
        name = f"{'admin' if is_admin else 'public'} {response.status_code}"
        self.statuses[name] += 1
        # Two nodes may agree on a 500, which passes; the gateway's own has this text.
        wrong = b"The gateway failed" in response.content or (
            is_admin and response.status_code == 500
        )
        assert not wrong, f"500 {response.text[:300]}: {case.as_curl_command()}"
        checks = self._checks
        if response.headers.get("Content-Type", "").startswith("text/event-stream"):
            # The document calls a stream's body a text; schemathesis takes each event for the body.
            checks = checks[:-1]
        case.validate_response(response, checks=checks)
        if is_admin and operation.path.endswith("/drain") and response.status_code == 200:
            resume_nodes(site)


def _names(path: str) -> dict[str, str]:
    """Names that exist, for the parameters of a path."""
    return {"name": "node-0", "id": "demo"} if "{name" in path else {"id": "demo"}


def _has_nothing_wrong(error: BaseException) -> bool:
    """Whether there just are no cases: an operation without parameters has no wrong ones."""
    return (
        type(error).__name__ in {"Unsatisfiable", "SkipTest", "Skipped"}
        or "negative" in str(error).lower()[:200]
    )


def fuzz_api(cases: int, seconds: float, seed: int = 0) -> tuple[dict[str, Any], list[str]]:
    """Send so many cases, or for so many seconds; returns the figures, and what was wrong."""
    return asyncio.run(_fuzz_api(cases, seconds, seed or random.SystemRandom().getrandbits(31)))


async def _fuzz_api(cases: int, seconds: float, seed: int) -> tuple[dict[str, Any], list[str]]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-api-") as name:
        async with running_site(Path(name)) as site:
            fuzzer, warm, after = await asyncio.to_thread(_send_all, site, cases, seconds, seed)
        records = Children(Path(name) / "loop").take()
    assert records, "the gateway's event loop is not watched: its start waits for files"
    problems = [*fuzzer.failures.values()][:MOST_FAILURES] + problems_of(records)
    if after.descriptors > warm.descriptors + 5 or after.rss_mb > warm.rss_mb + MOST_GROWTH_MB:
        problems.append(f"{warm} when warm, {after} afterwards")
    figures = {
        "cases": fuzzer.cases,
        "seconds": round(time.monotonic() - began),
        "statuses": dict(sorted(fuzzer.statuses.items())),
        "rss_mb": [warm.rss_mb, after.rss_mb],
        "descriptors": [warm.descriptors, after.descriptors],
        "seed": seed,
        "turns": table(one for one in records if one.kind == "turn"),
    }
    return figures, problems


def _send_all(
    site: Site, cases: int, seconds: float, seed: int
) -> tuple[Fuzzer, Measured, Measured]:
    """Send all cases; the fuzzer, and the process once it was warm and afterwards."""
    headers = {"Authorization": f"Bearer {site.keys['right']}"}
    while requests.get(f"{site.url}/ready", timeout=30).status_code != 200:
        time.sleep(0.1)
    document = requests.get(f"{site.admin_url}/openapi.json", headers=headers, timeout=30)
    fuzzer = Fuzzer(site, document.json(), seed)
    fuzzer.run(("right",), cases * WARM_SHARE, seconds * WARM_SHARE)
    warm, rest = _settled(site.process), 1 - WARM_SHARE
    fuzzer.run(("limited", "wrong", "none", "right"), cases * rest, seconds * rest)
    return fuzzer, warm, _settled(site.process)


def resume_nodes(site: Site) -> None:
    """Undo what a case has done to the nodes."""
    headers = {"Authorization": f"Bearer {site.keys['right']}"}
    for number in range(2):
        url = f"{site.admin_url}/admin/nodes/node-{number}/resume"
        requests.post(url, headers=headers, timeout=30)


def _settled(process: psutil.Process) -> Measured:
    """The process once its idle connections have been closed."""
    before = Measured.of(process)
    for _ in range(60):
        time.sleep(0.5)
        now = Measured.of(process)
        if now.descriptors >= before.descriptors and now.descriptors < 60:
            return now
        before = now
    return before


def report(figures: dict[str, Any], problems: list[str]) -> str:
    """The figures and problems, for people."""
    rate = figures["cases"] / max(1, figures["seconds"])
    line = (
        f"{'api':<10}{figures['cases']:>10} cases  {figures['seconds']:>7} s {rate:>7.0f}/s  "
        f"{'FAILED' if problems else 'ok'}"
    )
    turns = figures.pop("turns")
    return "\n".join(
        [line, json.dumps(figures), turns, *(f"FAILED: {problem}" for problem in problems)]
    )

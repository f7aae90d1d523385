"""CPU nodes (the emulator) and GPU endpoints like vLLM behind a whole gateway."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.emulator import EmulatedNode
from tests.gateways import NO_TLS, Running, running_gateway, until
from tests.hybrid.endpoint import Endpoint
from tests.virtual import in_virtual_time, now

CHAT = "/v1/chat/completions"
MODEL = "mistral-7b"
QUICK = {"health": {"interval": 0.1, "timeout": 0.5, "slow_start": 0}}


@dataclass(frozen=True, slots=True)
class Answer:
    """A client's response."""

    status: int
    tier: str | None
    fallback: str | None
    node: str | None
    text: str

    @property
    def whole(self) -> bool:
        return self.status == 200 and "error" not in self.text


@dataclass(slots=True)
class Site:
    """A gateway with its nodes."""

    running: Running
    gpu: Endpoint
    cpus: list[EmulatedNode]
    folder: Path

    async def ask(self, priority: str = "normal", *, stream: bool = False, **body: Any) -> Answer:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 4,
            "stream": stream,
            **body,
        }
        headers = {"X-Priority": priority}
        reply = await self.running.client.post(CHAT, json=body, headers=headers)
        got = reply.headers
        return Answer(
            reply.status_code,
            got.get("x-gateway-tier"),
            got.get("x-gateway-fallback"),
            got.get("x-gateway-node"),
            reply.text,
        )

    async def asked(self, count: int, priority: str = "normal", **body: Any) -> list[Answer]:
        """So many requests at once."""
        return await asyncio.gather(*(self.ask(priority, **body) for _ in range(count)))

    async def node(self, name: str = "gpu") -> dict[str, Any]:
        """As the admin API shows it."""
        async with httpx.AsyncClient(
            base_url=self.running.admin_url, trust_env=False, verify=NO_TLS
        ) as admin:
            found: dict[str, Any] = (await admin.get(f"/admin/nodes/{name}")).json()
            return found

    async def reload(self, settings: Mapping[str, Any]) -> None:
        self.running.write_settings(settings)
        async with httpx.AsyncClient(
            base_url=self.running.admin_url, trust_env=False, verify=NO_TLS
        ) as admin:
            assert (await admin.post("/admin/reload")).status_code == 200


@asynccontextmanager
async def a_site(
    folder: Path,
    gpu: Endpoint,
    cpus: Sequence[EmulatedNode],
    *,
    settings: Mapping[str, Any] | None = None,
    key: str = "secret",
    more: Sequence[Endpoint] = (),
    **keys: Any,
) -> AsyncIterator[Site]:
    """These nodes and a gateway in front of them; `keys` are the inventory's for GPU nodes."""
    (folder / "gpu.key").write_text(f"{key}\n")
    async with AsyncExitStack() as stack:
        for one in (gpu, *more):
            await stack.enter_async_context(one)
        for cpu in cpus:
            await stack.enter_async_context(cpu)
        nodes = [
            *(
                {
                    "name": f"gpu-{number}" if number else "gpu",
                    "url": one.url,
                    "kind": "openai",
                    "tier": "gpu",
                    "api_key_file": str(folder / "gpu.key"),
                    "model": {MODEL: one.model},
                    **keys,
                }
                for number, one in enumerate((gpu, *more))
            ),
            *({"name": f"cpu-{number}", "url": cpu.url} for number, cpu in enumerate(cpus)),
        ]
        running = await stack.enter_async_context(
            running_gateway(folder, nodes, {**QUICK, **(settings or {})})
        )
        yield Site(running, gpu, list(cpus), folder)


def a_cpu(**keys: Any) -> EmulatedNode:
    return EmulatedNode(**{"model": MODEL, "slots": 2, "decode_tps": 200.0, **keys})


def tiers(answers: Sequence[Answer]) -> Counter[str | None]:
    return Counter(answer.tier for answer in answers)


# Where requests go.


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("priority", ["urgent", "premium"])
@in_virtual_time
async def test_premium_goes_to_the_gpu_under_its_own_name_and_key(
    tmp_path: Path, priority: str, stream: bool
) -> None:
    async with a_site(tmp_path, Endpoint(), [a_cpu()]) as site:
        answer = await site.ask(priority, stream=stream)
        assert (answer.status, answer.tier, answer.fallback) == (200, "gpu", None)
        assert answer.node == "gpu"
        assert "one two three four" in answer.text.replace('"}', "") or "one " in answer.text
        assert [body["model"] for body in site.gpu.seen] == [site.gpu.model]
        assert site.gpu.statuses[401] == 0


@pytest.mark.parametrize("priority", ["normal", "batch"])
@in_virtual_time
async def test_other_classes_stay_on_the_cpu(tmp_path: Path, priority: str) -> None:
    async with a_site(tmp_path, Endpoint(), [a_cpu()]) as site:
        answers = await site.asked(12, priority)
        assert tiers(answers) == {"cpu": 12}
        assert {answer.fallback for answer in answers} == {None}
        assert site.gpu.seen == []


@in_virtual_time
async def test_premium_falls_back_to_the_cpu_while_the_gpu_is_full(tmp_path: Path) -> None:
    gpu = Endpoint(token=0.1, tokens=8)
    settings = {"hybrid": {"wait": 0}}
    async with a_site(tmp_path, gpu, [a_cpu()], settings=settings, slots=1) as site:
        first = asyncio.create_task(site.ask("premium", max_tokens=8))
        await until(lambda: gpu.running == 1)
        second = await site.ask("premium")
        assert (second.status, second.tier, second.fallback) == (200, "cpu", "gpu_full")
        assert (await first).tier == "gpu"
        assert gpu.peak == 1


@in_virtual_time
async def test_a_model_that_only_the_gpu_serves_is_served_to_every_class(tmp_path: Path) -> None:
    settings = {"hybrid": {"spill": {"share": 0}}}
    cpu = a_cpu(model="other")
    async with a_site(tmp_path, Endpoint(), [cpu], settings=settings) as site:
        for priority in ("premium", "normal", "batch"):
            answer = await site.ask(priority)
            assert (answer.status, answer.tier, answer.fallback) == (200, "gpu", None)


@in_virtual_time
async def test_a_fleet_without_cpu_nodes_serves_every_class(tmp_path: Path) -> None:
    async with a_site(tmp_path, Endpoint(), []) as site:
        assert tiers(await site.asked(6, "batch")) == {"gpu": 6}


@in_virtual_time
async def test_a_gpu_that_is_down_is_named_as_the_fallback_reason(tmp_path: Path) -> None:
    async with a_site(tmp_path, Endpoint(), [a_cpu()]) as site:
        await site.gpu.kill()
        await until(lambda: site.running.gateway.fleet.nodes["gpu"].state.value == "down")
        answer = await site.ask("premium")
        assert (answer.status, answer.tier, answer.fallback) == (200, "cpu", "gpu_down")
        await site.gpu.open()
        await until(lambda: site.running.gateway.fleet.nodes["gpu"].state.value == "ready")
        assert (await site.ask("premium")).tier == "gpu"


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@in_virtual_time
async def test_no_premium_request_fails_when_the_gpu_dies_under_load(
    tmp_path: Path, stream: bool
) -> None:
    """Plain answers, and streams without content yet: both may be retried on another node."""
    gpu = Endpoint(first=0.25, tokens=4)
    cpus = [a_cpu(slots=4, decode_tps=40.0), a_cpu(slots=4, decode_tps=40.0)]
    async with a_site(tmp_path, gpu, cpus, slots=16) as site:
        answers: list[Answer] = []
        stop = now() + 1.5

        async def client() -> None:
            while now() < stop:
                answers.append(await site.ask("premium", stream=stream))

        clients = [asyncio.create_task(client()) for _ in range(32)]
        await asyncio.sleep(0.6)
        await until(lambda: gpu.running >= 14)
        running = gpu.running
        # A stream's content is sent as a whole: the running ones have sent none.
        assert gpu.token == 0.0
        await gpu.kill()
        await asyncio.gather(*clients)
        assert [answer for answer in answers if not answer.whole] == []
        reasons = Counter(answer.fallback for answer in answers if answer.tier == "cpu")
        assert reasons["gpu_failed"] >= running // 2
        assert reasons["gpu_down"] > 0
        assert set(reasons) <= {"gpu_failed", "gpu_down", "gpu_full"}  # and never without one
        assert tiers(answers)["gpu"] > 0


@pytest.mark.slow
@in_virtual_time
async def test_no_premium_request_fails_when_several_gpu_nodes_die_at_once(tmp_path: Path) -> None:
    """More requests fail at once than the retry budget allows; falling back to the CPU is free."""
    gpus = [Endpoint(first=0.3) for _ in range(3)]
    cpus = [a_cpu(slots=8), a_cpu(slots=8)]
    async with a_site(tmp_path, gpus[0], cpus, more=gpus[1:], slots=16) as site:
        # All different: a request on which two nodes die is quarantined. No node is to blame here.
        asked = [
            asyncio.create_task(
                site.ask(
                    "premium",
                    stream=number % 2 == 0,
                    messages=[{"role": "user", "content": f"hello {number}"}],
                )
            )
            for number in range(48)
        ]
        await until(lambda: sum(gpu.running for gpu in gpus) == 48)
        for gpu in gpus:
            await gpu.kill()
        answers = await asyncio.gather(*asked)
        assert [answer for answer in answers if not answer.whole] == []
        assert tiers(answers) == {"cpu": 48}
        assert {answer.fallback for answer in answers} <= {"gpu_failed", "gpu_down", "gpu_full"}


# Spill-over.


def spill(**keys: Any) -> dict[str, Any]:
    return {**QUICK, "hybrid": {"spill": {"after": 0.05, **keys}}}


SLOW = {"slots": 1, "decode_tps": 20.0}


@pytest.mark.slow
@in_virtual_time
async def test_normal_spills_over_within_its_share_and_batch_never(tmp_path: Path) -> None:
    async with a_site(tmp_path, Endpoint(), [a_cpu(**SLOW)], settings=spill(share=0.25)) as site:
        answers = await site.asked(24)
        assert all(answer.whole for answer in answers)
        found = tiers(answers)
        assert 1 <= found["gpu"] <= 6
        assert {answer.fallback for answer in answers if answer.tier == "gpu"} == {"cpu_wait"}
        assert tiers(await site.asked(8, "batch")) == {"cpu": 8}


@pytest.mark.slow
@in_virtual_time
async def test_the_budget_spent_is_kept_over_a_reload(tmp_path: Path) -> None:
    async with a_site(tmp_path, Endpoint(), [a_cpu(**SLOW)], settings=spill(share=0.25)) as site:
        answers = await site.asked(16)
        spilled = tiers(answers)["gpu"]
        assert spilled >= 1
        await site.reload({**spill(share=0.25), "heartbeat": 7})
        answers += await site.asked(8)
        assert tiers(answers)["gpu"] <= 0.25 * len(answers)
        await site.reload({**spill(share=1), "heartbeat": 7})
        later = await site.asked(8)
        assert tiers(later)["gpu"] >= 1


@pytest.mark.slow
@in_virtual_time
async def test_the_budget_is_exceeded_by_one_request_at_most(tmp_path: Path) -> None:
    # 4 tokens at 1000 a million: 0.004 each; the budget is for two and a half of them.
    settings = spill(money_per_hour=0.01)
    cost = {"prompt": 0, "completion": 1000}
    async with a_site(
        tmp_path, Endpoint(), [a_cpu(**SLOW)], settings=settings, cost_per_million_tokens=cost
    ) as site:
        answers = await site.asked(20)
        answers += await site.asked(10)
        assert all(answer.whole for answer in answers)
        assert 2 <= tiers(answers)["gpu"] <= 3


@pytest.mark.slow
@in_virtual_time
async def test_a_request_that_did_not_happen_is_not_charged(tmp_path: Path) -> None:
    gpu = Endpoint(places=0, refuse=True, retry_after="0")
    settings = spill(money_per_hour=0.01)
    cost = {"prompt": 0, "completion": 1000}
    async with a_site(
        tmp_path, gpu, [a_cpu(**SLOW)], settings=settings, cost_per_million_tokens=cost
    ) as site:
        answers = await site.asked(10)
        assert all(answer.whole for answer in answers)
        assert tiers(answers) == {"cpu": 10}
        assert gpu.statuses[429] > 0
        shown = site.running.gateway.scheduler.tier_policy.view(now())["spill"]
        assert isinstance(shown, dict)
        assert (shown["paid"], shown["reserved"], shown["running"]) == (0.0, 0.0, 0)


# Endpoints that report little.


@in_virtual_time
async def test_an_endpoint_is_probed_only_for_its_models(tmp_path: Path) -> None:
    async with a_site(tmp_path, Endpoint(), [a_cpu()]) as site:
        await site.ask("premium")
        assert set(site.gpu.paths) == {"/v1/models", CHAT}
        shown = await site.node()
        assert (shown["state"], shown["slots_total"], shown["kind"]) == ("ready", 8, "openai")


@in_virtual_time
@pytest.mark.parametrize("more", [{}, {"stream_options": {"include_usage": True}}])
async def test_a_stream_with_a_finish_reason_may_lack_its_done(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    # `transformers serve` ends its streams so.
    async with a_site(tmp_path, Endpoint(done=False), [a_cpu()]) as site:
        answer = await site.ask("premium", stream=True, **more)
        assert answer.tier == "gpu"
        assert '"error"' not in answer.text
        assert answer.text.count("data: [DONE]\n\n") == 1
        assert answer.text.endswith("data: [DONE]\n\n")


@in_virtual_time
async def test_a_stream_without_finish_reason_and_done_ended_early(tmp_path: Path) -> None:
    async with a_site(tmp_path, Endpoint(done=False, finishes=False), [a_cpu()]) as site:
        answer = await site.ask("premium", stream=True)
        assert "ended too early" in answer.text
        assert "[DONE]" not in answer.text


@in_virtual_time
async def test_a_wrong_key_is_reported_and_the_cpu_serves(tmp_path: Path) -> None:
    async with a_site(tmp_path, Endpoint(), [a_cpu()], key="wrong", model=None) as site:
        shown = await site.node()
        assert shown["state"] == "down"
        assert "refuses our key (401 on /v1/models)" in shown["reason"]
        assert "api_key_file" in shown["reason"]
        answer = await site.ask("premium")
        assert (answer.status, answer.tier) == (200, "cpu")


@in_virtual_time
async def test_a_key_that_only_a_request_shows_to_be_wrong_is_reported_too(tmp_path: Path) -> None:
    # The list of models may be hidden from valid keys, so a rejection there proves nothing.
    async with a_site(tmp_path, Endpoint(), [a_cpu()], key="wrong") as site:
        first = await site.ask("premium")
        assert (first.status, first.tier, first.fallback) == (200, "cpu", "gpu_failed")
        shown = await site.node()
        assert shown["state"] == "down"
        assert f"refuses our key (401 on {CHAT})" in shown["reason"]
        second = await site.ask("premium")
        assert (second.status, second.fallback) == (200, "gpu_down")
        assert site.gpu.paths[CHAT] == 1


@in_virtual_time
async def test_a_clients_own_organization_does_not_lock_out_others(tmp_path: Path) -> None:
    async with a_site(tmp_path, Endpoint(), [a_cpu()]) as site:
        for _ in range(5):
            foreign = {"X-Priority": "premium", "OpenAI-Organization": "org-of-another"}
            body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
            reply = await site.running.client.post(CHAT, json=body, headers=foreign)
            assert reply.status_code == 200
        assert (await site.node())["state"] == "ready"
        answer = await site.ask("premium")
        assert (answer.status, answer.tier) == (200, "gpu")


@in_virtual_time
async def test_a_corrected_key_is_used_at_once(tmp_path: Path) -> None:
    async with a_site(tmp_path, Endpoint(), [a_cpu()], key="wrong") as site:
        await site.ask("premium")
        (tmp_path / "gpu.key").write_text("secret\n")
        site.running.gateway.schedule_reload()
        await until(lambda: site.running.gateway.fleet.nodes["gpu"].state.value == "ready")
        assert (await site.ask("premium")).tier == "gpu"


@pytest.mark.slow
@in_virtual_time
async def test_a_pause_requested_by_the_endpoint_is_kept(tmp_path: Path) -> None:
    gpu = Endpoint(places=1, refuse=True, retry_after="1", first=0.2)
    async with a_site(tmp_path, gpu, [a_cpu(slots=4)]) as site:
        answers = await site.asked(4, "premium")
        assert all(answer.whole for answer in answers)
        refused = gpu.refused_at[-1]
        reasons = Counter(answer.fallback for answer in answers)
        assert reasons["gpu_failed"] >= 1
        late = [await site.ask("premium") for _ in range(3)]
        assert {answer.fallback for answer in late} == {"gpu_limited"}
        assert "refused work" in (await site.node())["reason"]
        await until(lambda: not site.running.gateway.fleet.nodes["gpu"].paused(now()))
        assert (await site.ask("premium")).tier == "gpu"
        assert [came for came in gpu.came_at if refused < came < refused + 0.9] == []


@pytest.mark.slow
@in_virtual_time
async def test_the_limit_of_an_endpoint_is_learnt_and_no_premium_request_fails(
    tmp_path: Path,
) -> None:
    gpu = Endpoint(places=3, refuse=True, first=0.02, token=0.005)
    async with a_site(tmp_path, gpu, [a_cpu(slots=4, decode_tps=80.0)]) as site:
        answers: list[Answer] = []
        stop = now() + 4.0

        async def client() -> None:
            while now() < stop:
                answers.append(await site.ask("premium"))

        await asyncio.gather(*(client() for _ in range(8)))
        assert [answer for answer in answers if not answer.whole] == []
        assert (await site.node())["slots_total"] <= 4
        assert tiers(answers)["gpu"] > 20
        late = [when for when in gpu.refused_at if when > stop - 2.0]
        assert len(late) <= 4


@in_virtual_time
async def test_other_classes_wait_for_ejected_cpu_nodes(tmp_path: Path) -> None:
    settings = {"retries": {"wait_for_node": 0.2}}
    async with a_site(tmp_path, Endpoint(), [a_cpu()], settings=settings) as site:
        await site.cpus[0].kill()
        await until(lambda: site.running.gateway.fleet.nodes["cpu-0"].state.value == "down")
        answer = await site.ask("normal")
        assert (answer.status, site.gpu.seen) == (503, [])
        assert "no_node" in answer.text
        assert (await site.ask("premium")).tier == "gpu"


@pytest.mark.slow
@in_virtual_time
async def test_nothing_stays_reserved_after_disconnects_and_deaths(tmp_path: Path) -> None:
    gpu = Endpoint(first=0.05, token=0.02, tokens=8)
    settings = spill(share=1, money_per_hour=1)
    cost = {"prompt": 1, "completion": 1}
    rng = random.Random(7)
    async with a_site(
        tmp_path, gpu, [a_cpu(**SLOW)], settings=settings, cost_per_million_tokens=cost
    ) as site:

        async def client(number: int) -> None:
            with suppress(TimeoutError):
                async with asyncio.timeout(rng.uniform(0.02, 1.2)):
                    await site.ask(stream=number % 2 == 0, max_tokens=8)

        clients = []
        for number in range(80):
            clients.append(asyncio.create_task(client(number)))
            await asyncio.sleep(0.01)
            if number == 40:
                await gpu.kill()
                await gpu.open()
        await asyncio.gather(*clients)

        def shown() -> Any:
            return site.running.gateway.scheduler.tier_policy.view(now())["spill"]

        await until(lambda: shown()["running"] == 0)
        assert shown()["reserved"] == 0.0
        assert shown()["spilled"] > 0
        assert shown()["paid"] > 0.0

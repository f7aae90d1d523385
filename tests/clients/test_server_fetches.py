"""Where the server itself would fetch a URL: there the gateway refuses it, and nowhere else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np
import pytest

from gateway.errors import GatewayError
from tests.request.test_request import prepared
from tests.servers import running_demo_servers

pytestmark = [
    pytest.mark.real,
    pytest.mark.binary_only("the tests' wheel takes no projector"),
    pytest.mark.asyncio(loop_scope="session"),
]

WIDTH = 128  # of the demo model
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"


def write_projector(path: Path) -> None:
    """Write a vision encoder of random weights for the demo model."""
    noise = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "mlp")
    writer.add_bool("clip.use_gelu", True)
    sizes = {"image_size": 28, "patch_size": 14, "embedding_length": 32, "feed_forward_length": 64}
    sizes |= {"block_count": 1, "attention.head_count": 2, "projection_dim": WIDTH}
    for name, value in sizes.items():
        writer.add_uint32(f"clip.vision.{name}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    for name in ("image_mean", "image_std"):
        writer.add_array(f"clip.vision.{name}", [0.5, 0.5, 0.5])
    shapes: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (32, 3, 14, 14), "v.class_embd": (32,),
        "v.position_embd.weight": (5, 32), "mm.0.weight": (WIDTH, 32), "mm.0.bias": (WIDTH,),
        "mm.2.weight": (WIDTH, WIDTH), "mm.2.bias": (WIDTH,),
        "v.blk.0.ffn_up.weight": (64, 32), "v.blk.0.ffn_up.bias": (64,),
        "v.blk.0.ffn_down.weight": (32, 64), "v.blk.0.ffn_down.bias": (32,),
    }  # fmt: skip
    for name in ("v.pre_ln", "v.post_ln", "v.blk.0.ln1", "v.blk.0.ln2"):
        shapes |= {f"{name}.weight": (32,), f"{name}.bias": (32,)}
    for name in ("q", "k", "v", "out"):
        part = f"v.blk.0.attn_{name}"
        shapes |= {f"{part}.weight": (32, 32), f"{part}.bias": (32,)}
    for name, shape in shapes.items():
        writer.add_tensor(name, noise.normal(0, 0.05, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@asynccontextmanager
async def listener() -> AsyncIterator[tuple[str, list[bytes]]]:
    """A web server that keeps the head of each request."""
    heads: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", heads


def chat(*parts: Any, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}], "max_tokens": 1, **more}


def response(*items: Any, **more: Any) -> dict[str, Any]:
    asked = {"role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    return {"input": [asked, *items], **more}


def bodies(url: str) -> list[tuple[str, dict[str, Any]]]:
    """Bodies with this URL, in places that servers look at and in others."""
    part = {"type": "image_url", "image_url": {"url": url}}
    image = {"type": "image", "source": {"type": "url", "url": url}}
    given = {"type": "input_image", "image_url": url}
    text = {"type": "text", "text": "hi"}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "1"}
    schema = {"type": "object", "properties": {"image_url": {"type": "string", "default": url}}}
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {"type": "image", "source": image}}
    result = {"type": "tool_result", "tool_use_id": "1"}
    return [
        *(
            (CHAT, chat(one))
            for one in (
                part,
                {"type": "image_url", "image_url": url},
                {"type": "input_audio", "input_audio": {"data": url, "format": "wav"}},
                {"type": "input_video", "input_video": {"data": url}},
                {"type": "input_video", "input_video": {"url": url}},
                {"type": "video_url", "video_url": {"url": url}},
                {"type": "video_url", "video_url": url},
                {"type": "file", "file": {"file_data": url}},
                {"type": "file", "file_url": {"url": url}},
                image, given, text | {"image_url": {"url": url}},
            )
        ),
        (CHAT, chat(text, metadata={"image_url": url})),
        (CHAT, chat(text, chat_template_kwargs={"image_url": url})),
        (CHAT, chat(text, image_url=url, source={"type": "url", "url": url})),
        (CHAT, chat(text, mcp_servers=[{"type": "url", "url": url}])),
        (CHAT, chat(text, prompt={"prompt_string": "", "multimodal_data": [url]})),
        (CHAT, {"messages": [{"role": "user", "content": "hi", "images": [url]}]}),
        ("/apply-template", chat(part)),
        ("/v1/chat/completions/input_tokens", chat(part)),
        (RESPONSES, response({"role": "user", "content": [given]})),
        (RESPONSES, response({"role": "system", "content": [given]})),
        (RESPONSES, response(call, output | {"output": [given]})),
        (RESPONSES, response(call, output | {"output": [part]})),
        (RESPONSES, response(call | {"arguments": f'{{"image_url": "{url}"}}'})),
        (RESPONSES, response(tools=[{"type": "mcp", "server_label": "a", "server_url": url}])),
        (RESPONSES, response(messages=[{"role": "user", "content": [part]}])),
        (RESPONSES, response(metadata={"image_url": url})),
        ("/v1/responses/input_tokens", response({"role": "user", "content": [given]})),
        *(
            (path, chat(*blocks, **more))
            for path in ("/v1/messages", "/v1/messages/count_tokens")
            for blocks, more in (
                ([image], {}),
                ([result | {"content": [image]}], {}),
                ([result | {"content": [result | {"content": [image]}]}], {}),
                ([{"type": "document", "source": image["source"]}], {}),
                ([{"type": "image", "source": {"url": url}}], {}),
                ([part], {}),
                ([text], {"tools": [{"name": "f", "input_schema": schema}]}),
                ([text], {"metadata": {"image_url": url}}),
                ([use], {}),
            )
        ),
        ("/completion", {"prompt": {"prompt_string": "<__media__>", "multimodal_data": [url]}}),
        ("/completion", {"prompt": "hi", "n_predict": 1, "image_data": [{"data": url, "id": 1}]}),
    ]  # fmt: skip


async def test_the_server_fetches_nothing_that_the_gateway_lets_pass(tmp_path: Path) -> None:
    projector = tmp_path / "projector.gguf"
    write_projector(projector)
    extra = ("--mmproj", str(projector), "--no-mmproj-offload")
    fetched = refusals = passed = 0
    with running_demo_servers(1, extra=extra) as [server]:
        async with (
            listener() as (address, heads),
            httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=60) as client,
        ):
            for number, (path, body) in enumerate(bodies(f"{address}/x")):
                body |= {"model": "demo", "n_predict": 1}
                before = len(heads)
                await client.post(path, json=body)
                is_fetched = len(heads) > before
                try:
                    prepared(body, path)
                except GatewayError:
                    refusals += 1
                else:
                    passed += 1
                    assert not is_fetched, (number, path, body)
                fetched += is_fetched
    # Other servers read what is refused besides.
    assert (fetched, refusals, passed) == (14, 35, 14)

"""Coding agents as programs: how each is told of a gateway, and what it is asked.

They are those that npm or pip installs in two minutes; `package.json` and `aider.txt` beside this
file pin them. To renew the latter: `pip install aider-chat==VERSION` and `pip freeze` in an empty
environment of Python 3.11. From 3.13 on it is left out, since aider takes no newer Python.
The `overrides` stand in for programs of other systems that qwen-code names and the registry lacks.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from asyncio.subprocess import DEVNULL, STDOUT, Process
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.clients import npm
from tests.clients.npm import node

WITH_AIDER = sys.version_info[:2] < (3, 13)
MODEL = "agents"
CONTEXT = 32_768
RUN_LIMIT = 120.0
IDLE = 9.0
"""Seconds of silence after which Codex is told to give a stream up."""


@dataclass(frozen=True, slots=True)
class Agent:
    """One program, which gets `PROMPT` and ends by itself."""

    name: str
    path: str
    """The API's path that it asks."""
    first_requests: int
    """How many it sends at once: opencode also asks for a title."""
    set_up: Callable[[Path, Path, str], tuple[list[str | Path], dict[str, str]]]
    """From `node_modules`, an empty home and the gateway's URL: its command and environment."""
    calls_tools: bool = True
    """Aider has none: it reads its edits out of the answer."""


def install(config: pytest.Config) -> Path:
    """A `node_modules` with agents, and beside it aider's own environment; fetched once."""
    return npm.install(config, Path(__file__).parent, (*npm.PINS, "aider.txt"), _fetch)


def _fetch(folder: Path, pins: list[Path]) -> None:
    npm.fetch(folder, pins)
    if not WITH_AIDER:
        return
    python = folder / "aider/bin/python"
    pip = (python, "-m", "pip", "install", "--quiet", "--only-binary", ":all:", "--no-deps")
    for command in (
        (sys.executable, "-m", "venv", folder / "aider"),
        (*pip, "--no-compile", "--disable-pip-version-check", "--requirement", pins[-1]),
    ):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=npm.FETCH_LIMIT, check=False
        )
        assert done.returncode == 0, f"pip could not fetch aider: {done.stderr}"


def _codex(modules: Path, home: Path, url: str) -> tuple[list[str | Path], dict[str, str]]:
    (home / "config.toml").write_text(
        f"""
model = "{MODEL}"
model_provider = "gateway"
check_for_update_on_startup = false
[model_providers.gateway]
name = "gateway"
base_url = "{url}/v1"
wire_api = "responses"
stream_idle_timeout_ms = {IDLE * 1000:.0f}
[analytics]
enabled = false
"""
    )
    (program,) = modules.glob("codex-linux-x64/vendor/*/bin/codex")
    return [program, "exec", "--skip-git-repo-check", "--json", PROMPT], {"CODEX_HOME": str(home)}


def _claude(modules: Path, home: Path, url: str) -> tuple[list[str | Path], dict[str, str]]:
    program = modules / "@anthropic-ai/claude-code-linux-x64/claude"
    # Its own prompt and all of its tools are 57,000 tokens of this model.
    short = ("--system-prompt", "Be brief.", "--tools", "Read")
    return [program, "-p", PROMPT, *short], {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def _opencode(modules: Path, home: Path, url: str) -> tuple[list[str | Path], dict[str, str]]:
    config = {
        "provider": {
            "gateway": {
                "npm": "@ai-sdk/openai-compatible",
                "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
                "models": {MODEL: {"limit": {"context": CONTEXT, "output": 4096}}},
            }
        },
        "model": f"gateway/{MODEL}",
        "small_model": f"gateway/{MODEL}",
        "autoupdate": False,
        "share": "disabled",
    }
    (home / "opencode.json").write_text(json.dumps(config))
    return [modules / "opencode-linux-x64/bin/opencode", "run", "--format", "json", PROMPT], {
        "OPENCODE_CONFIG": str(home / "opencode.json"),
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }


def _continue(modules: Path, home: Path, url: str) -> tuple[list[str | Path], dict[str, str]]:
    model = {
        "name": "gateway",
        "provider": "openai",
        "model": MODEL,
        "apiBase": f"{url}/v1",
        "apiKey": "none",
        "roles": ["chat"],
    }
    config = {"name": "gateway", "version": "1.0.0", "schema": "v1", "models": [model]}
    config_file = home / "config.yaml"
    config_file.write_text(json.dumps(config))
    program = modules / "@continuedev/cli/dist/cn.js"
    return [node(), program, "--config", config_file, "--auto", "-p", PROMPT], {
        "CONTINUE_CLI_ENABLE_TELEMETRY": "0"
    }


def _qwen(modules: Path, home: Path, url: str) -> tuple[list[str | Path], dict[str, str]]:
    program = modules / "@qwen-code/qwen-code/cli-entry.js"
    # Its own prompt and all of its tools are 47,000 tokens of this model.
    short = ("--bare", "--system-prompt", "Be brief.", "--core-tools", "read_file")
    return [node(), program, "--auth-type", "openai", "--yolo", *short, "-p", PROMPT], {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "none",
        "OPENAI_MODEL": MODEL,
    }


def _cline(modules: Path, home: Path, url: str) -> tuple[list[str | Path], dict[str, str]]:
    name = "openai-compatible"
    settings = {"provider": name, "apiKey": "none", "model": MODEL, "baseUrl": f"{url}/v1"}
    entry = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    providers = {"version": 1, "lastUsedProvider": name, "modes": {}, "providers": {name: entry}}
    file = home / ".cline/data/settings/providers.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(providers))
    program = modules / "@cline/cli-linux-x64/bin/cline"
    # Without the mode it leaves a daemon behind.
    return [program, "-P", name, "-m", MODEL, "--json", PROMPT], {
        "CLINE_SESSION_BACKEND_MODE": "local",
        "CLINE_NO_AUTO_UPDATE": "1",
    }


def _aider(modules: Path, home: Path, url: str) -> tuple[list[str | Path], dict[str, str]]:
    program = (modules.parent / "aider/bin/python", "-m", "aider", f"--model=openai/{MODEL}")
    server = (f"--openai-api-base={url}/v1", "--openai-api-key=none")
    quiet = ("--no-check-update", "--no-show-release-notes", "--no-show-model-warnings")
    return [*program, *server, *quiet, "--analytics-disable", "--no-git", "--message", PROMPT], {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True"
    }


PROMPT = "Say hello"

AGENTS = (
    Agent("codex", "/v1/responses", 1, _codex),
    Agent("claude", "/v1/messages", 1, _claude),
    Agent("opencode", "/v1/chat/completions", 2, _opencode),
    Agent("continue", "/v1/chat/completions", 1, _continue),
    Agent("qwen", "/v1/chat/completions", 1, _qwen),
    Agent("cline", "/v1/chat/completions", 1, _cline),
    *([Agent("aider", "/v1/chat/completions", 1, _aider, calls_tools=False)] if WITH_AIDER else []),
)


@asynccontextmanager
async def running(agent: Agent, modules: Path, folder: Path, url: str) -> AsyncIterator[Process]:
    """The agent at work in a folder of its own, from which it reaches this machine alone."""
    home, work = folder / agent.name, folder / agent.name / "work"
    work.mkdir(parents=True)
    command, environment = agent.set_up(modules, home, url)
    nowhere = "http://127.0.0.1:9"
    with (home / "output").open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=DEVNULL, stdout=output, stderr=STDOUT, cwd=work, start_new_session=True,
            env={
                "PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(home),
                "HTTPS_PROXY": nowhere, "HTTP_PROXY": nowhere, "NO_PROXY": "127.0.0.1",
                **environment,
            },
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def output_of(agent: Agent, process: Process, folder: Path) -> str:
    """What the agent printed before it ended without a failure."""
    status = await asyncio.wait_for(process.wait(), RUN_LIMIT)
    printed = (folder / agent.name / "output").read_text(errors="replace")
    assert status == 0, f"{agent.name} ended with {status}:\n{printed[-4000:]}"
    return printed

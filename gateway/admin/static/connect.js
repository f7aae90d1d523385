// How clients connect: the settings of `docs/clients.md`, with this gateway's address, a key and a model.

import { plain } from "./format.js";

/** One word of a shell, quoted if it must be. */
function word(text) {
  return /^[A-Za-z0-9._:/@%+=-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

/** A text within quotes, as JSON, YAML, TOML and Python read it. */
const quoted = JSON.stringify;

/** The [client, where it stands, text] of each; `base` is the gateway's address without a slash at its end. */
export function snippetsOf(base, key, name, context = 65536) {
  const [model, v1] = [plain(name), `${base}/v1`];
  return [
    ["curl", "a shell", `curl ${word(`${v1}/chat/completions`)} -H ${word(`Authorization: Bearer ${key}`)} \\
  -H 'Content-Type: application/json' \\
  -d ${word(JSON.stringify({ model, messages: [{ role: "user", content: "Hello" }] }))}`],
    ["openai for Python", "Python", `from openai import OpenAI

client = OpenAI(base_url=${quoted(v1)}, api_key=${quoted(key)})
answer = client.chat.completions.create(
    model=${quoted(model)}, messages=[{"role": "user", "content": "Hello"}]
)`],
    ["anthropic for Python", "Python", `from anthropic import Anthropic

client = Anthropic(base_url=${quoted(base)}, api_key=${quoted(key)})
answer = client.messages.create(
    model=${quoted(model)}, max_tokens=512, messages=[{"role": "user", "content": "Hello"}]
)`],
    ["Codex", "~/.codex/config.toml, with the key in GATEWAY_KEY", `model = ${quoted(model)}
model_provider = "gateway"

[model_providers.gateway]
name = "gateway"
base_url = ${quoted(v1)}
wire_api = "responses"
env_key = "GATEWAY_KEY"               # leave it out without keys
request_max_retries = 1               # 4
stream_max_retries = 1                # 5`],
    ["Claude Code", "a shell", `export ANTHROPIC_BASE_URL=${word(base)} ANTHROPIC_AUTH_TOKEN=${word(key)}
export ANTHROPIC_MODEL=${word(model)} ANTHROPIC_DEFAULT_HAIKU_MODEL=${word(model)}
export CLAUDE_STREAM_IDLE_TIMEOUT_MS=1800000 CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
claude`],
    ["opencode", "opencode.json", `{
  "provider": {
    "gateway": {
      "npm": "@ai-sdk/openai-compatible",
      "options": {"baseURL": ${quoted(v1)}, "apiKey": ${quoted(key)}},
      "models": {${quoted(model)}: {"limit": {"context": ${context}, "output": 4096}}}
    }
  },
  "model": ${quoted(`gateway/${model}`)},
  "small_model": ${quoted(`gateway/${model}`)}
}`],
    ["qwen-code", "a shell", `OPENAI_BASE_URL=${word(v1)} OPENAI_API_KEY=${word(key)} OPENAI_MODEL=${word(model)} qwen --auth-type openai`],
    ["Continue", "a file for cn --config FILE", `name: local
version: 1.0.0
schema: v1
models:
  - {name: gateway, provider: openai, model: ${quoted(model)}, apiBase: ${quoted(v1)}, apiKey: ${quoted(key)}, roles: [chat]}`],
    ["cline", "a shell", `cline auth openai -k ${word(key)} -b ${word(v1)} -m ${word(model)}
CLINE_SESSION_BACKEND_MODE=local cline -P openai -m ${word(model)}`],
    ["aider", "a shell", `aider --model ${word(`openai/${model}`)} --openai-api-base ${word(v1)} --openai-api-key ${word(key)}`],
  ];
}

from __future__ import annotations

import time

from tests.config.conftest import LoadNodes, Problems
from tests.each_case import each_case

LITELLM = """
model_list:
  - model_name: gpt-4o
    litellm_params: {model: openai/gpt-4o, api_key: os.environ/OPENAI_API_KEY}
  - model_name: mistral
    litellm_params: {model: openai/m-7b, api_base: "http://h1:8080/v1", api_key: os.environ/KEY}
  - model_name: mistral
    litellm_params: {model: openai/m-7b, api_base: "http://h2:8080/v1/", api_key: none}
  - model_name: q
    litellm_params: {model: ollama/qwen2.5, api_base: os.environ/GPU_BASE}
general_settings: {master_key: sk-secret}
"""

SWAP = """
startPort: 9000
macros:
  server: /opt/llama-server --port ${PORT}
models:
  "qwen2.5:7b": {cmd: "${server} -m q.gguf"}
  coder: {cmd: "llama-server --host 0.0.0.0 --port 9501 -m c.gguf", ttl: 300}
  vision: {cmd: docker run vllm/vllm-openai, proxy: "http://127.0.0.1:9600"}
"""

COMPOSE = """
services:
  llama-1:
    image: ghcr.io/ggml-org/llama.cpp:server
    command: -m a.gguf --port 8080
    ports: ["${OUTER:-8081}:8080"]
    environment: {LLAMA_API_KEY: secret}
  llama-2: {image: "ghcr.io/ggml-org/llama.cpp:server", command: [-m, a.gguf, --port, "9090"]}
  vllm: {image: vllm/vllm-openai, ports: [{target: 8000, published: 8001}]}
  web: {image: nginx, ports: ["80:80"]}
  ollama: {image: ollama/ollama, ports: ["11434:11434"]}
"""

AS_NODES = {
    "LiteLLM": """
nodes:
  - {name: mistral, url: http://h1:8080, model: {mistral: m-7b}, api_key_env: KEY}
  - {name: mistral-2, url: http://h2:8080, model: {mistral: m-7b}}
  - {name: q, url: "${GPU_BASE}", kind: openai, models_on_demand: true, model: {q: qwen2.5}}
""",
    "llama-swap": """
nodes:
  - {name: coder, url: http://127.0.0.1:9501, model: {coder: coder}}
  - {name: qwen2.5-7b, url: http://127.0.0.1:9000, model: {"qwen2.5:7b": "qwen2.5:7b"}}
  - {name: vision, url: http://127.0.0.1:9600, kind: openai, model: {vision: vision}}
  # llama-swap starts and stops these. To leave that to it, write it as the one node instead:
  # - {name: llama-swap, url: http://127.0.0.1:8080, kind: openai, models_on_demand: true}
  # To leave it to the gateway, run llama-server --models-dir; ttl, groups and matrix are
  # then models.NAME.idle_unload, pin and replicas in the settings.
""",
    "Docker Compose": """
nodes:
  - {name: llama-1, url: http://127.0.0.1:8081}
  - {name: llama-2, url: http://llama-2:9090}
  - {name: vllm, url: http://127.0.0.1:8001, kind: openai}
  - {name: ollama, url: http://127.0.0.1:11434, kind: openai, models_on_demand: true}
""",
}
FILES = {"LiteLLM": LITELLM, "llama-swap": SWAP, "Docker Compose": COMPOSE}


@each_case("program", FILES)
def test_another_program_s_file_is_told_with_the_lines_that_would_stand_here(
    nodes_problems: Problems, load_nodes: LoadNodes, gateway_problems: Problems, program: str
) -> None:
    text, lines = FILES[program], tuple(AS_NODES[program].strip().splitlines())
    (problem,) = nodes_problems(text)
    assert problem.message == f"this is a configuration of {program}, not an inventory"
    assert text.splitlines()[problem.line - 1].startswith(f"{problem.key}:")
    assert problem.lines == lines
    assert "secret" not in f"{problem}{problem.lines}"
    # They are an inventory.
    variables = dict.fromkeys(("GPU_BASE", "KEY"), "http://gpu")
    assert len(load_nodes("\n".join(lines), **variables).nodes) >= 3
    # It is told in place of settings, too, and without a variable's value.
    (problem,) = gateway_problems(text, PORT="a-secret", OUTER="a-secret")
    assert problem.message == f"this is a configuration of {program}, not the gateway's settings"
    assert "--nodes FILE" in problem.remedy
    assert problem.lines == lines


MEGABYTE = "x" * 1_000_000


@each_case(
    "text",
    [
        f"macros: {{m: {MEGABYTE}}}\nmodels: {{a: {{cmd: '{'${m}' * 2400}'}}}}",
        "macros: {" + ", ".join(f"m{n}: x" for n in range(4000)) + "}\nmodels: {"
        + ", ".join(f"a{n}: {{cmd: x --port 1}}" for n in range(4000)) + "}",
        f"x: &x {MEGABYTE}\nservices: {{a: {{image: i, command: [{'*x, ' * 9999}]}}}}",
        f"model_list: [{{model_name: {MEGABYTE}, litellm_params: {{api_base: http://h}}}}]",
        "model_list:\n"
        + "".join(
            f"- {{model_name: m{n}, litellm_params: {{api_base: http://h}}}}\n"
            for n in range(2000)
        ),
    ],
)  # fmt: skip
def test_a_huge_one_is_told_in_few_words(gateway_problems: Problems, text: str) -> None:
    began = time.process_time()
    (problem,) = gateway_problems(text)
    assert time.process_time() - began < 1.0
    assert sum(map(len, problem.lines)) < 5000


def test_our_own_keys_of_the_same_name_are_ours(
    nodes_problems: Problems, gateway_problems: Problems
) -> None:
    (problem,) = gateway_problems("models: {fast: {alias: mistral}}\n")
    assert problem.message == "unknown key"
    (problem,) = nodes_problems("services: {a: b}\nnodes: []\n")
    assert problem.message == "unknown key"

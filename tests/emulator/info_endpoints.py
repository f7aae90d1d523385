"""The endpoints that need no slot: health, properties, slots, models, metrics, token counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tests.emulator.apis import SAMPLING
from tests.emulator.embeddings import EMBEDDING_SIZE
from tests.emulator.language_model import BEGIN_TOKEN, count_tokens, detokenize, tokenize
from tests.emulator.request_body import RefusedError, chat_prompt, messages_prompt

if TYPE_CHECKING:
    from tests.emulator.node import EmulatedNode

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% if not loop.last or m['role'] != 'assistant' %}<|eot|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MODEL_SIZE = 3_176_960  # bytes
Body = dict[str, Any]


def health(node: EmulatedNode, query: str) -> Body:
    return {"status": "ok"}


def props(node: EmulatedNode, query: str) -> Body:
    return {
        "default_generation_settings": {"params": SAMPLING, "n_ctx": node.context},
        "total_slots": len(node.slots.slots),
        "model_alias": node.model,
        "model_ftype": "all F32",
        "model_path": f"/models/{node.model}.gguf",
        "modalities": {"vision": node.vision, "video": False, "audio": node.audio},
        "media_marker": node.marker,
        "endpoint_slots": node.endpoint_slots,
        "endpoint_props": True,
        "endpoint_metrics": True,
        "ui": True,
        "ui_settings": {},
        "chat_template": TEMPLATE,
        "chat_template_caps": {},
        "bos_token": "<s>",
        "eos_token": "</s>",
        "build_info": node.build,
        "is_sleeping": node.sleeping,
        "cors_proxy_enabled": False,
    }


def slots(node: EmulatedNode, query: str) -> list[Body]:
    if not node.endpoint_slots:
        message = "This server does not support slots endpoint. Start it with `--slots`"
        raise RefusedError(501, "not_supported_error", message)
    return [slot.as_json(node.context) for slot in node.slots.slots]


def models(node: EmulatedNode, query: str) -> Body:
    name = node.model
    unknown = ("modified_at", "size", "digest", "description", "parameters")
    details = ("parent_model", "family", "parameter_size", "quantization_level")
    as_ollama = {
        "name": name,
        "model": name,
        **dict.fromkeys(unknown, ""),
        "type": "model",
        "tags": [""],
        "capabilities": ["completion"],
        "details": {**dict.fromkeys(details, ""), "format": "gguf", "families": [""]},
    }
    return {
        "models": [as_ollama],
        "object": "list",
        "data": [
            {
                "id": name,
                "aliases": [name, *node.aliases],
                "tags": [],
                "object": "model",
                "architecture": architecture(node),
                "created": node.started,
                "owned_by": "llamacpp",
                "meta": meta(node),
            }
        ],
    }


def architecture(node: EmulatedNode) -> Body:
    """What the model reads and writes; an embedding or reranking server says "text" too."""
    also = [name for name, has in (("image", node.vision), ("audio", node.audio)) if has]
    return {"input_modalities": ["text", *also], "output_modalities": ["text"]}


def meta(node: EmulatedNode) -> Body:
    return {
        "vocab_type": 1,
        "n_vocab": 576,
        "n_ctx": node.context,
        "n_ctx_train": node.context_train,
        "n_embd": EMBEDDING_SIZE,
        "n_params": 794240,
        "size": node.model_bytes,
        "ftype": "all F32",
    }


def metrics(node: EmulatedNode) -> str:
    engine = node.engine
    figures = {
        "prompt_tokens_total": ("counter", engine.prompt_tokens),
        "prompt_tokens_cached_total": ("counter", engine.cached_tokens),
        "tokens_predicted_total": ("counter", engine.tokens),
        "requests_processing": ("gauge", node.busy),
        "requests_deferred": ("gauge", len(node.slots.waiting)),
    }
    return "".join(
        f"# HELP llamacpp:{name} {name}\n# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {value}\n"
        for name, (kind, value) in figures.items()
    )


def tokenize_text(body: Body) -> Body:
    ids = tokenize(str(body.get("content", "")))
    if body.get("add_special") is True:
        ids.insert(0, BEGIN_TOKEN)
    if body.get("with_pieces"):
        return {"tokens": [{"id": i, "piece": detokenize([i])} for i in ids]}
    return {"tokens": ids}


def detokenize_ids(body: Body) -> Body:
    return {"content": detokenize([i for i in body.get("tokens", []) if isinstance(i, int)])}


def apply_template(body: Body) -> Body:
    return {"prompt": chat_prompt(body)}


def count_chat(body: Body) -> Body:
    tokens = count_tokens(chat_prompt(body))
    return {"input_tokens": tokens, "object": "response.input_tokens"}


def count_messages(body: Body) -> Body:
    return {"input_tokens": count_tokens(messages_prompt(body))}


GETS: dict[str, Callable[[EmulatedNode, str], Any]] = {
    "/health": health,
    "/v1/health": health,
    "/props": props,
    "/slots": slots,
    "/v1/models": models,
    "/models": models,
}
POSTS: dict[str, Callable[[Body], Body]] = {
    "/tokenize": tokenize_text,
    "/detokenize": detokenize_ids,
    "/apply-template": apply_template,
    "/v1/chat/completions/input_tokens": count_chat,
    "/v1/messages/count_tokens": count_messages,
}
PUBLIC = {"/health", "/v1/health", "/"}
WAKING = {"/slots", *POSTS}
"""Those that need the model, which a sleeping server loads again for them."""

"""A server's properties: read from its own answers without trust, compared with the inventory."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from gateway.config.inventory import NodeSpec

MOST_SLOTS = 65_536
MOST_CONTEXT = 1 << 30
MOST_MODELS = 1_000
LONGEST_PROPERTY = 512  # characters of a name or another text
MOST_MODEL_SIZE = 1 << 60
# The work that a llama.cpp server was started for. It says so nowhere: see `health.py`.
Purpose = Literal["chat", "embeddings", "rerank", "unknown"]

# Endpoints that a server of this purpose refuses with 501; a reranker answers embeddings of zeros.
# All servers answer chats. One for embeddings or reranking is meant for them only where no node of
# its model is for chats (`ModelIndex.capable_nodes`).
REFUSED_FOR_PURPOSE: dict[Purpose | None, frozenset[str]] = {
    "chat": frozenset({"embeddings", "rerank"}),
    "embeddings": frozenset({"rerank"}),
    "rerank": frozenset({"embeddings"}),
}

# The `media_marker` of builds whose processes all have the same one.
CONSTANT_MARKER = "<__media__>"
# What a server's speed and caches depend on; see `ServerProperties.served_as`.
ServedAs = tuple[tuple[str, ...] | None, int | None, int | None, str | None, str | None, int | None]


# What is kept in a file must be within the limits that a server's answers must meet.
_Slots = Annotated[int, msgspec.Meta(ge=1, le=MOST_SLOTS)]
_Context = Annotated[int, msgspec.Meta(ge=1, le=MOST_CONTEXT)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=MOST_MODEL_SIZE)]
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST_PROPERTY)]


@dataclass(slots=True)
class ServerProperties:
    """What a server has reported. None: it has not reported it. Kept while the server is down."""

    slots: _Slots | None = None
    context: _Context | None = None  # tokens of one slot
    trained_context: _Context | None = None
    models: tuple[_Text, ...] = ()  # its own names for the models that it serves, one for each
    aliases: dict[_Text, str] = field(default_factory=dict)
    """Further names that it answers to, and for each the name in `models`."""
    build: _Text | None = None
    template: _Text | None = None  # a hash of its chat template
    file: _Text | None = None  # the model's file, without its folder
    vision: bool | None = None
    audio: bool | None = None
    video: bool | None = None
    slots_endpoint: bool | None = None
    metrics_endpoint: bool | None = None
    n_params: _Size | None = None
    size: _Size | None = None  # bytes of the model's tensors
    ftype: _Text | None = None
    refused: set[_Text] = field(default_factory=set)
    """Endpoints that it has refused with 501, such as `rerank`."""
    is_router: bool = False  # whether it holds many models, and loads them on demand
    most_loaded: Annotated[int, msgspec.Meta(ge=0, le=MOST_MODELS)] = 0
    """Models that a router holds at once; 0: as many as fit."""
    process: _Text | None = None
    """A mark that each process of the server chooses anew; None: this build has none."""
    shared_pool: bool | None = None
    """Whether this process has shown that its slots share one pool of tokens."""
    purpose: Purpose | None = None  # none: no process of it has been asked yet
    purpose_asked: bool = False
    """Whether this process has answered; else `purpose` is that of an earlier one."""
    remembered: bool = field(default=False, compare=False)
    """Whether this was reported to an earlier process, or before it left the inventory."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names that it answers to."""
        return (*self.models, *self.aliases)

    @property
    def all_refused(self) -> frozenset[str]:
        """Endpoints that it does not serve: it has refused them, or is for other work."""
        return self.refused_for_purpose | self.refused

    @property
    def refused_for_purpose(self) -> frozenset[str]:
        """Endpoints that its process was not started for."""
        known = REFUSED_FOR_PURPOSE.get(self.purpose) if self.purpose_asked else None
        return known or frozenset()

    def version_key(self) -> tuple[object, ...]:
        """Changes when another build or another model runs."""
        return (self.build, self.models, self.n_params, self.size, self.ftype, self.template)

    def served_as(self) -> ServedAs:
        """Models, parameters, bytes, file, build and slots; None: not reported."""
        return (self.models or None, self.n_params, self.size, self.file, self.build, self.slots)

    def resume_key(self) -> tuple[object, ...]:
        """Must be equal on two servers for one to resume the other's stream.

        All of it stands in `/props`, so that one query is enough; None where that is silent.
        """
        return (self.file, self.ftype, self.template, self.build)

    def clear_remembered(self) -> None:
        """It answers: remembered values must not fill in what the answer leaves out."""
        if self.remembered:
            # These are the same as long as its process is, which `read_props` finds out.
            fresh = ServerProperties(process=self.process, purpose=self.purpose)
            if self.process:
                fresh.shared_pool, fresh.purpose_asked = self.shared_pool, self.purpose_asked
            for one in fields(self):
                setattr(self, one.name, getattr(fresh, one.name))

    def read_props(self, props: object) -> None:
        """Take in the answer to `/props`; values that it leaves out stay as they were."""
        if not isinstance(props, dict):
            return
        self.slots = _count(props.get("total_slots"), MOST_SLOTS) or self.slots
        settings = props.get("default_generation_settings")
        if isinstance(settings, dict):
            self.context = _count(settings.get("n_ctx"), MOST_CONTEXT) or self.context
        self.build = _name(props.get("build_info")) or self.build
        process = _name(props.get("media_marker"))
        process = None if process == CONSTANT_MARKER else process
        if process != self.process:
            self.process, self.shared_pool, self.purpose_asked = process, None, False
        if (path := _name(props.get("model_path"))) is not None:
            self.file = path.replace("\\", "/").rpartition("/")[2] or None
        self.ftype = _name(props.get("model_ftype")) or self.ftype
        template = props.get("chat_template")
        if isinstance(template, str):
            # A JSON string may hold lone surrogates, which UTF-8 does not.
            raw = template.encode("utf-8", "surrogatepass")
            self.template = hashlib.sha256(raw).hexdigest()[:16]
        modalities = props.get("modalities")
        if isinstance(modalities, dict):
            self.vision = _flag(modalities.get("vision"), self.vision)
            self.audio = _flag(modalities.get("audio"), self.audio)
            self.video = _flag(modalities.get("video"), self.video)
        self.slots_endpoint = _flag(props.get("endpoint_slots"), self.slots_endpoint)
        self.metrics_endpoint = _flag(props.get("endpoint_metrics"), self.metrics_endpoint)
        self.is_router = props.get("role") == "router"
        self.most_loaded = _count(props.get("max_instances"), MOST_MODELS) or 0
        alias = _name(props.get("model_alias"))
        if alias and not self.models and not self.is_router:
            self.models = (alias,)

    def read_models(self, answer: object) -> None:
        """Take in the answer to `/v1/models`; values that it leaves out stay as they were."""
        data = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(data, list):
            return
        entries = [entry for entry in data[:MOST_MODELS] if isinstance(entry, dict)]
        named = {name: entry for entry in entries if (name := _name(entry.get("id")))}
        self.models = tuple(named)
        self.aliases = _read_aliases(named)
        only = entries[0] if len(entries) == 1 else {}
        architecture = only.get("architecture")
        inputs = architecture.get("input_modalities") if isinstance(architecture, dict) else None
        if isinstance(inputs, list):
            self.vision, self.audio, self.video = (
                kind in inputs for kind in ("image", "audio", "video")
            )
        # vLLM and SGLang tell the context so; a node of kind `openai` is not asked for `/props`.
        self.context = _count(only.get("max_model_len"), MOST_CONTEXT) or self.context
        meta = only.get("meta")
        if isinstance(meta, dict):
            self.n_params = _count(meta.get("n_params"), MOST_MODEL_SIZE) or self.n_params
            self.size = _count(meta.get("size"), MOST_MODEL_SIZE) or self.size
            self.ftype = _name(meta.get("ftype")) or self.ftype
            self.context = self.context or _count(meta.get("n_ctx"), MOST_CONTEXT)
            trained = _count(meta.get("n_ctx_train"), MOST_CONTEXT)
            self.trained_context = trained or self.trained_context

    def read_routed(self, entry: dict[str, Any], slots: int | None, context: int | None) -> None:
        """Take in a router's entry for its one model, and the arguments of that model's server."""
        self.read_models({"data": [entry]})
        self.slots, self.context = slots or self.slots, self.context or context

    def slots_reported(self, total: int) -> None:
        """It answered `/slots`, with so many slots."""
        self.slots_endpoint = True
        self.slots = self.slots or total

    def purpose_found(self, purpose: Purpose | None) -> None:
        """It was asked for its purpose; None: without an answer, so it is asked again later."""
        self.purpose, self.purpose_asked = purpose or self.purpose or "unknown", purpose is not None

    def pool_learnt(self) -> bool:
        """Its slots share one pool of tokens; whether that is new."""
        known, self.shared_pool = self.shared_pool, True
        return not known

    def process_ended(self) -> None:
        """The server's process may have ended. A build that has `process` shows by that."""
        if self.process is None:
            self.shared_pool, self.purpose_asked = None, False

    def path_refused(self, path: str) -> None:
        """It has no `/slots`, or no `/metrics`, or does not allow it."""
        if path == "/slots":
            self.slots_endpoint = False
        else:
            self.metrics_endpoint = False


def server_identity(spec: NodeSpec) -> tuple[object, ...]:
    """Changes when a node's entry in the inventory names another server, or a router's model."""
    return (spec.url, spec.kind) if spec.instance is None else (spec.url, spec.kind, spec.instance)


def server_key(spec: NodeSpec, *also: str) -> str:
    """A hash of the identity, so that it is short and a file shows no address."""
    whole = msgspec.json.encode((*also, *server_identity(spec)))
    return hashlib.sha256(whole).hexdigest()[:32]


def is_plausible(properties: ServerProperties) -> bool:
    """Whether properties from a file have no more names than a server's answers may, and fit."""
    count, known = len(properties.names) + len(properties.refused), properties.models
    return count <= MOST_MODELS and all(one in known for one in properties.aliases.values())


# A server's answers have up to 4 MB, and a million empty lists would take 0.1 s and 100 MB. So only
# the fields of interest are decoded, and none that is far longer than it has a reason to be.

LONGEST_VALUE = 32 * 1024  # bytes of a field's value, unless it is a text
# Objects and lists of an answer to `/v1/models`: hosted services have some ten for each model.
MOST_OBJECTS = 50 * MOST_MODELS
# What decoding raises for bytes that are no JSON of the expected form.
UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
_NULL = msgspec.Raw(b"null")


def _fields_of(kind: str, names: str) -> type[msgspec.Struct]:
    """A struct of fields with these names, which are not decoded."""
    return msgspec.defstruct(kind, [(name, msgspec.Raw, _NULL) for name in names.split()])


_Props = _fields_of(
    "_Props",
    "total_slots default_generation_settings build_info media_marker model_path model_ftype "
    "chat_template modalities endpoint_slots endpoint_metrics model_alias role max_instances",
)

_Model = _fields_of("_Model", "id aliases architecture max_model_len meta status")


class _Models(msgspec.Struct):
    data: list[_Model]  # type: ignore[valid-type]


class _Slot(msgspec.Struct):
    is_processing: msgspec.Raw
    n_prompt_tokens: msgspec.Raw = _NULL
    id_task: msgspec.Raw = _NULL


_PROPS = msgspec.json.Decoder(_Props)
_MODELS = msgspec.json.Decoder(_Models)
_SLOTS = msgspec.json.Decoder(list[_Slot])


def parse_props(body: bytes) -> object:
    """The fields of interest of an answer to `/props`; None: it is none."""
    try:
        return _values(_PROPS.decode(body))
    except UNREADABLE:
        return None


def parse_models(body: bytes) -> object:
    """The fields of interest of an answer to `/v1/models`; None: it is none."""
    if body.count(b"{") + body.count(b"[") > MOST_OBJECTS:
        return None
    try:
        data = _MODELS.decode(body).data
        return {"data": [_values(one) for one in data[:MOST_MODELS]]}
    except UNREADABLE:
        return None


def _values(found: msgspec.Struct) -> dict[str, Any]:
    """The fields that are not too long, decoded. Raises: UNREADABLE."""
    values: dict[str, Any] = {}
    for name in found.__struct_fields__:
        raw = getattr(found, name)
        if len(memoryview(raw)) <= LONGEST_VALUE or bytes(memoryview(raw)[:1]) == b'"':
            values[name] = msgspec.json.decode(raw)
    return values


SlotTask = tuple[int, bytes]  # a slot, and the server's number of what it works on


class SlotCounts(NamedTuple):
    """An answer to `/slots`."""

    busy_tokens: tuple[int, ...]
    """Tokens that each busy slot has read and written; 0: it does not say."""
    total: int
    tasks: frozenset[SlotTask] = frozenset()  # what the busy slots work on


def count_slots(body: bytes) -> SlotCounts | None:
    """The busy slots, and all, of an answer to `/slots`; None if it is malformed."""
    if body.count(b'"is_processing"') > MOST_SLOTS:
        return None
    try:
        slots = _SLOTS.decode(body)
    except UNREADABLE:
        return None
    busy = [(n, slot) for n, slot in enumerate(slots) if bytes(slot.is_processing) == b"true"]
    told = [bytes(slot.n_prompt_tokens) for _, slot in busy]
    tokens = tuple(
        [_count(int(one), MOST_CONTEXT) or 0 if _NUMBER.fullmatch(one) else 0 for one in told]
    )
    tasks = frozenset([(number, bytes(slot.id_task)[:20]) for number, slot in busy])
    return SlotCounts(tokens, len(slots), tasks) if 0 < len(slots) <= MOST_SLOTS else None


_NUMBER = re.compile(rb"[0-9]{1,10}")
_PROCESSING = re.compile(rb"^llamacpp:requests_processing (\d{1,5})$", re.MULTILINE)


def count_processing(metrics: bytes) -> int | None:
    """Busy slots by an answer to `/metrics`; None: it does not say."""
    found = _PROCESSING.search(metrics)
    return None if found is None else int(found[1])


# The memory of a model, by what its server tells after a load: `meta` of `/v1/models`, and the
# arguments that a router gives for each of its models. Neither tells layers and key heads, so that
# the KV cache is a bound, too high rather than too low: docs/fit.md compares it with real servers
# and with the shapes of known models. A model's file tells all: `gateway.local.memory`.

_KV_TYPE_BITS = {
    "f32": 32.0, "f16": 16.0, "bf16": 16.0, "q8_0": 8.5, "q4_0": 4.5, "q4_1": 5.0, "iq4_nl": 4.5,
    "q5_0": 5.5, "q5_1": 6.0,
}  # fmt: skip
_PROCESS_BYTES = 40 << 20  # of a server without its model
_VOCABULARY_BYTES = 250  # of a token
_DEFAULT_MICRO_BATCH = 512  # llama.cpp's own
# A layer holds at least 12 times the square of the width: attention without shared key heads 4, a
# block of eight thirds of the width 8. One of experts holds far more: there the width is the bound.
_LAYER_SQUARES = 12
_MOST_KEY_WIDTH = 2048  # elements of a layer's keys where heads share them, as in models with
_SHARING_VOCABULARY = 1 << 16  # so large a vocabulary


def number_given(given: Mapping[str, str], option: str, most: int) -> int | None:
    """The number that a server was given for an option; None: none from 1 to `most`."""
    value = given.get(option, "")
    is_number = value.isascii() and value.isdigit() and len(value) <= 10
    return _count(int(value), most) if is_number else None


def memory_told(meta: object, args: Sequence[str]) -> int | None:
    """Return the bytes that a server takes with its model: weights, full slots, and the rest.

    None: `meta` has no size, since the model is not loaded. Without `n_params` or `n_embd` the KV
    cache is taken to be a fifth of the weights.
    """
    if not isinstance(meta, dict) or not (size := _count(meta.get("size"), MOST_MODEL_SIZE)):
        return None
    params = _count(meta.get("n_params"), MOST_MODEL_SIZE) or 0
    width = _count(meta.get("n_embd"), 1 << 20) or 0
    vocabulary = _count(meta.get("n_vocab"), 1 << 24) or 0
    context = _count(meta.get("n_ctx"), MOST_CONTEXT) or 0  # of one slot
    given = dict(pairwise(args))
    slots, cells, micro_batch, prompts = (
        number_given(given, name, MOST_MODEL_SIZE) or 0
        for name in ("--parallel", "--ctx-size", "--ubatch-size", "--cache-ram")
    )
    slots = slots or 1
    cells = cells or context * slots
    rest = _PROCESS_BYTES + vocabulary * (_VOCABULARY_BYTES + 8 * slots) + (prompts << 20)
    if not (params and width):
        return min(size + size // 5 + rest, MOST_MODEL_SIZE)
    layers = max(1.0, (params - vocabulary * width) / (_LAYER_SQUARES * width**2))
    layers = min(layers, 24 + width / 64)
    keys = width if vocabulary < _SHARING_VOCABULARY else min(width, _MOST_KEY_WIDTH)
    bits = sum(_KV_TYPE_BITS.get(given.get(f"--cache-type-{one}", ""), 16.0) for one in "kv")
    # A computation holds some 17 widths of a micro-batch in F32, and the mask of a slot.
    rest += (micro_batch or _DEFAULT_MICRO_BATCH) * (70 * width + 2 * (context or cells // slots))
    return min(int(size + cells * layers * keys * bits / 8) + rest, MOST_MODEL_SIZE)


def inventory_drift(spec: NodeSpec, properties: ServerProperties) -> tuple[str, ...]:
    """How the server differs from what the inventory declares, a sentence each."""
    if properties.remembered:
        return ()
    drift = []
    slots, context = properties.slots, properties.context
    if spec.slots is not None and slots is not None and spec.slots != slots:
        drift.append(f"slots: the inventory says {spec.slots}, the server has {slots}")
    if spec.context is not None and context is not None and spec.context != context:
        drift.append(
            f"context: the inventory says {spec.context} tokens a slot, the server has {context}"
        )
    if spec.kv == "split" and properties.shared_pool:
        drift.append("kv: the inventory says split, the server's slots share one pool")
    declared = set((spec.models or {}).values()) if properties.models else set()
    if missing := sorted(declared - set(properties.names)):
        drift.append(
            f"model: the inventory says {', '.join(missing)}, "
            f"the server serves {', '.join(properties.names[:8])}"
        )
    return tuple(drift)


def _read_aliases(entries: dict[str, dict[str, Any]]) -> dict[str, str]:
    """For each further name of the models the model; with them at most MOST_MODELS names."""
    found: dict[str, str] = {}
    for model, entry in entries.items():
        aliases = entry.get("aliases")
        for alias in aliases[:MOST_MODELS] if isinstance(aliases, list) else ():
            if len(entries) + len(found) == MOST_MODELS:
                return found
            if _name(alias) and alias not in entries:
                found.setdefault(alias, model)
    return found


def _count(value: Any, most: int) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= most:
        return None
    return value


def _name(value: Any) -> str | None:
    return value if isinstance(value, str) and 0 < len(value) <= LONGEST_PROPERTY else None


def _flag(value: Any, otherwise: bool | None) -> bool | None:  # noqa: FBT001
    return value if isinstance(value, bool) else otherwise

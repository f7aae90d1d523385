"""What a router tells of its models: `nodes/router.py`, by its list and its events.

An input is a list, and the same bytes are events. Oracles: nobody raises; names are short, plain and
distinct, numbers within their bounds; events are the same however they are cut; whatever follows a
command of ours, a model's phase is one that a list can show, and a failed load is tried later.
"""

from __future__ import annotations

import itertools

from gateway.nodes.router import (
    LONGEST_EVENT,
    MOST_ALIASES,
    MOST_NAME,
    MOST_RETRY,
    EventLines,
    LoadPhase,
    ModelLoad,
    read_list,
)
from gateway.nodes.server_properties import MOST_CONTEXT, MOST_SLOTS, parse_models
from tests.fuzz.inputs import Check, Target, divide, seed

_AFTER = {
    "loaded": {LoadPhase.READY, LoadPhase.RETIRING, LoadPhase.UNLOADING},
    "sleeping": {LoadPhase.READY, LoadPhase.RETIRING, LoadPhase.UNLOADING},
    "loading": {LoadPhase.LOADING, LoadPhase.UNLOADING},
    "unloaded": {LoadPhase.UNLOADED, LoadPhase.FAILED},
}


def make_check() -> Check:
    """The check of one input."""

    def check(data: bytes) -> None:
        one = divide(data)
        listed = read_list(parse_models(one.text))
        assert len({model.name for model in listed}) == len(listed)
        for model, kind in zip(listed, itertools.count(one.choice)):
            assert all(0 < len(name) <= MOST_NAME and name.isprintable() for name in model.names)
            assert len(model.names) <= 1 + MOST_ALIASES
            assert model.slots is None or 0 < model.slots <= MOST_SLOTS
            assert model.context is None or 0 <= model.context <= MOST_CONTEXT
            load = ModelLoad(failures=kind % 3)
            if kind & 4:
                load.order("unload" if kind & 8 else "load", "fuzz", 0.0)
                load.command_taken(1.0)
            followed = (True, False, None)[kind % 3]
            load.reported(model, 5.0, 5.0, followed=followed)
            assert model.status is None or load.phase in _AFTER[model.status]
            if load.phase is LoadPhase.FAILED:
                assert 5.0 < load.retry_at <= 5.0 + MOST_RETRY
        whole, cut = EventLines(), EventLines()
        events = list(whole.add(one.text + b"\n"))
        pieces = [*one.pieces(), b"\n"]
        assert [event for piece in pieces for event in cut.add(piece)] == events
        assert len(events) <= one.text.count(b"\n") + 1 <= LONGEST_EVENT
        assert all(event.progress is None or 0.0 <= event.progress <= 1.0 for event in events)

    return check


_ENTRY = (
    b'{"id":"a","aliases":["b"],"status":{"value":"%b","args":["--parallel","2","--ctx-size",'
    b'"8192","--model","/a"],"failed":true,"exit_code":1},"meta":{"n_ctx":4096,"size":9}}'
)

MODELS = Target(
    "models",
    make_check,
    (
        *(
            seed(b'{"data":[' + _ENTRY % value + b"]}", choice)
            for value in (b"loaded", b"loading", b"unloaded", b"sleeping", b"other")
            for choice in (0, 4, 5, 6, 13)
        ),
        seed(b'{"data":[{"id":"a","status":{"value":{"b":1},"args":{"c":2}},"aliases":3}]}'),
        seed(
            b'data: {"model":"a","event":"status_change","data":{"status":"loading","progress":'
            b'{"stages":["text_model"],"current":"text_model","value":0.5}}}\n\n'
            b'data: {"model":"*","event":"models_reload"}\n\n: odd\ndata: []\ndata: {"data":1}\n'
        ),
    ),
    (b'"status"', b'"value"', b'"progress"', b"data:", b'"aliases"', b'"args"', b'"--parallel"'),
)

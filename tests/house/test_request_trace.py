from __future__ import annotations

from tests.house.request_trace import STAGES, ModuleTracer, figures
from tests.house.source import ROOT, Function, modules, with_scopes


class FrameStub:
    """A stand-in for a frame and its code, with what the tracer reads of them."""

    def __init__(self, module: str, function: str, file: str = "a.py") -> None:
        self.f_globals = {"__name__": module}
        self.f_code = self
        self.co_qualname = self.co_name = function
        self.co_filename = file


def traced(*, learnt: bool = False) -> ModuleTracer:
    tracer = ModuleTracer()
    received, asked, granted, over = (min(names) for names in STAGES.values())
    steps: list[tuple[FrameStub, str, object]] = [
        (FrameStub("gateway.protocol", "data"), "call", None),
        (FrameStub("gateway.handler", received), "call", None),
        (FrameStub("gateway.value", "__init__", "<string>"), "call", None),
        (FrameStub("gateway.late", "<module>"), "call", None),
        (FrameStub("httpx", "send"), "call", None),
        (FrameStub("gateway.keys", "find"), "call" if learnt else "line", None),
        (FrameStub("gateway.proxy", asked), "call", None),
        (FrameStub("gateway.node", "take"), "call", None),
        (FrameStub("gateway.scheduler", granted), "return", None),
        (FrameStub("gateway.retry", "spend"), "call", None),
        (FrameStub("gateway.scheduler", granted), "return", 1),
        (FrameStub("gateway.response_stream", "read"), "call", None),
        (FrameStub("gateway.handler", over), "return", None),
    ]
    for frame, event, value in steps:
        tracer(frame, event, value)  # type: ignore[arg-type]  # what it reads of a frame
    assert tracer.stages_passed == len(STAGES)
    return tracer


def test_a_trace_lists_the_modules_up_to_the_lease_and_in_all() -> None:
    lists = figures([traced(learnt=True), traced(), traced(learnt=True), traced()])
    way = ["gateway.handler", "gateway.proxy", "gateway.node", "gateway.retry"]
    assert lists["to_lease"] == way
    assert lists["to_lease_first"] == [way[0], "gateway.keys", *way[1:]]
    assert lists["forwarder_to_lease"] == lists["forwarder_to_lease_first"] == way[1:]
    assert lists["entered"] == ["gateway.protocol", *way, "gateway.response_stream"]


def test_each_stage_is_marked_by_a_function_of_this_checkout() -> None:
    methods = {
        f"{scopes[-1].name}.{node.name}"
        for module in modules(ROOT)
        for node, scopes in with_scopes(module.tree)
        if isinstance(node, Function) and scopes
    }
    assert [mark for mark, names in STAGES.items() if not names & methods] == []

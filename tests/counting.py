"""What a piece of code does, in bytecode instructions: the same on every machine, however busy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

if sys.version_info >= (3, 12):

    def instructions(run: Callable[[], object]) -> int:
        """How many instructions `run` executes in Python; a hundred times slower than without."""
        # From 3.12 on, a trace tells no instruction of code that runs for the first time.
        counted = 0
        events, tool = sys.monitoring, sys.monitoring.OPTIMIZER_ID

        def executed(code: CodeType, offset: int) -> None:
            nonlocal counted
            counted += code is not instructions.__code__

        events.use_tool_id(tool, "instructions")
        try:
            events.register_callback(tool, events.events.INSTRUCTION, executed)
            events.set_events(tool, events.events.INSTRUCTION)
            run()
        finally:
            events.set_events(tool, events.events.NO_EVENTS)
            events.free_tool_id(tool)
        return counted

else:

    def instructions(run: Callable[[], object]) -> int:
        """How many instructions `run` executes in Python; a hundred times slower than without."""
        counted = 0

        def within(frame: FrameType, event: str, arg: Any) -> Any:
            nonlocal counted
            counted += event == "opcode"
            return within

        def called(frame: FrameType, event: str, arg: Any) -> Any:
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
            return within

        before = sys.gettrace()
        sys.settrace(called)
        try:
            run()
        finally:
            sys.settrace(before)
        return counted

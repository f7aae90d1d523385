from __future__ import annotations

import pytest

from gateway.tools.cli.batch_texts import batch_details, command_for, end_by
from gateway.tools.cli.terminal import CommandFailed

COUNTS = {"total": 10, "completed": 8, "failed": 2}


def test_the_end_of_a_batch_decides_the_command() -> None:
    end_by({"status": "in_progress", "request_counts": {}})
    end_by({"status": "completed", "request_counts": {"total": 1, "completed": 1, "failed": 0}})
    with pytest.raises(CommandFailed, match="2 of 10 lines failed"):
        end_by({"status": "completed", "request_counts": COUNTS})
    with pytest.raises(CommandFailed, match="batch_1 expired"):
        end_by({"id": "batch_1", "status": "expired"})
    errors = {"data": [{"message": "The input file is empty."}]}
    with pytest.raises(CommandFailed, match="batch_1 failed: The input file is empty"):
        end_by({"id": "batch_1", "status": "failed", "errors": errors})


def test_details_leave_out_what_is_not_known() -> None:
    details = dict(batch_details({"id": "batch_1", "status": "validating", "metadata": {}}))
    assert details == {"id": "batch_1", "progress": "validating"}


def test_commands_can_be_copied() -> None:
    assert command_for("show", {"id": "batch 1"}) == "llama-gateway batch show 'batch 1'"

from __future__ import annotations

from gateway.events import EventBus
from gateway.observe.history import RecentRequests
from tests.observe.test_metrics import finished


def test_a_request_is_found_before_its_event_is_due() -> None:
    bus = EventBus(lambda _seconds, _work: None)
    recent = RecentRequests(bus, lambda: 0.0)
    bus.publish_deferred(finished(x_request_id="it"))
    assert [one.record.x_request_id for one in recent.find("it")] == ["it"]

from __future__ import annotations

import pytest
from pydantic import ValidationError

from gateway.config.keys import SHARED_CACHE, CachePolicy, CacheSpec, cache_policy, has_labels
from tests.each_case import each_case


def test_without_a_setting_all_share_all() -> None:
    assert cache_policy((None, None, CacheSpec()), "alice", "a") is SHARED_CACHE
    nothing = CacheSpec(hide=False, isolate="off", nodes={})
    assert cache_policy((nothing,), "alice", None) == CachePolicy()


def test_each_field_is_the_most_specific_ones() -> None:
    key = CacheSpec(hide=False, prompt_cache=False)
    group = CacheSpec(hide=True, isolate="group", nodes={"b": "2", "a": "1"})
    everybody = CacheSpec(isolate="key", nodes={"c": "3"}, prompt_cache=True)
    assert cache_policy((key, group, everybody), "alice", "team") == CachePolicy(
        hide=False, scope="group team", node_labels=(("a", "1"), ("b", "2")), prompt_cache=False
    )


@each_case(
    ("isolate", "group", "scope"),
    [
        ("group", "team", "group team"),
        ("group", None, "caller alice"),
        ("key", "team", "caller alice"),
        ("off", "team", ""),
    ],
)
def test_the_scope_is_a_group_or_a_caller(isolate: str, group: str | None, scope: str) -> None:
    spec = CacheSpec.model_validate({"isolate": isolate})
    assert cache_policy((spec,), "alice", group).scope == scope


def test_what_no_node_may_have_cached_has_a_scope_of_its_own() -> None:
    policy = cache_policy((CacheSpec(isolate="group", prompt_cache=False),), "alice", "team")
    assert policy.scope_of("req_1") != policy.scope_of("req_2")
    assert CachePolicy(scope="group team").scope_of("req_1") == "group team"


def test_off_is_read_as_yaml_reads_it() -> None:
    assert CacheSpec.model_validate({"isolate": False}).isolate == "off"
    assert CacheSpec.model_validate({"isolate": "Group"}).isolate == "group"


@each_case(
    "spec", [{"isolate": "user"}, {"hide": "perhaps"}, {"nodes": {"": "x"}}, {"hidden": True}]
)
def test_bad_input_is_refused(spec: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        CacheSpec.model_validate(spec)


def test_a_node_needs_all_labels() -> None:
    wanted = (("tenant", "a"), ("zone", "1"))
    assert has_labels({"tenant": "a", "zone": "1", "more": "x"}, wanted)
    assert not has_labels({"tenant": "a"}, wanted)
    assert not has_labels({"tenant": "a", "zone": "2"}, wanted)
    assert has_labels({}, ())

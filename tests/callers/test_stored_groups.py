"""Groups of keys in the store, and what follows where nobody has defined one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.callers import stored_groups
from gateway.callers.key_sync import KeySync
from gateway.callers.keys import KeyRing, new_key
from gateway.callers.stored_groups import GroupDesk, put_group, read_groups, with_groups
from gateway.callers.stored_keys import KeyDesk, KeysRefused, keys_revision
from gateway.config.keys import GroupSpec, KeySpec
from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.store.database import locate_store
from gateway.store.failures import StoreUnavailable
from gateway.store.store import Store
from tests.callers.build import NOW


def no_models(_: Sequence[KeySpec]) -> Sequence[str]:
    return ()


async def no_use() -> dict[str, list[dict[str, Any]]]:
    return {}


def desks(store: Store, **settings: Any) -> tuple[KeyDesk, GroupDesk]:
    chosen = Settings.model_validate(settings)
    keys = KeyDesk(chosen, store, no_models)
    return keys, GroupDesk(keys, no_use)


async def refused(work: Any) -> GatewayError:
    with pytest.raises(GatewayError) as raised:
        await work
    return raised.value


async def test_a_group_is_kept_changed_whole_and_removed(store: Store) -> None:
    _, groups = desks(store)
    fields = {"limits": {"budget": "20/month", "models": ["m"]}, "user_limits": {"rpm": 5}}
    made = await groups.put("night", {**fields, "cache": {"isolate": "group"}})
    assert (made["origin"], made["keys"], made["limits"]) == ("store", 0, fields["limits"])
    assert made["cache"] == {"isolate": "group"}
    await groups.put("night", {"limits": {"rpm": 9}})
    (shown,) = (await groups.list())["groups"]
    assert (shown["limits"], shown["user_limits"], shown["cache"]) == ({"rpm": 9}, None, None)
    assert (await groups.remove("night"))["warnings"] == []
    assert (await groups.list())["groups"] == []
    assert (await refused(groups.remove("night"))).status == 404


async def test_a_change_of_a_group_is_a_change_for_those_who_follow_keys(store: Store) -> None:
    ring, changes = KeyRing(), [0]
    sync = KeySync(store, ring, None, on_change=lambda: changes.append(len(sync.groups)))
    await sync.refresh()
    _, groups = desks(store)
    before = store.run_now(keys_revision)
    await groups.put("night", {"limits": {"rpm": 9}})
    assert store.run_now(keys_revision) > before
    await sync.refresh()
    assert sync.groups == {"night": GroupSpec.model_validate({"limits": {"rpm": 9}})}
    await groups.remove("night")
    await sync.refresh()
    await sync.refresh()
    assert changes[-2:] == [1, 0]


async def test_groups_of_the_settings_come_before_those_of_the_store(store: Store) -> None:
    own = {"night": {"limits": {"rpm": 1}}}
    store.run_now(lambda c: put_group(c, "night", GroupSpec(), NOW))
    store.run_now(lambda c: put_group(c, "day", GroupSpec(), NOW))
    _, groups = desks(store, groups=own)
    found = await groups.list()
    assert {one["name"]: one["origin"] for one in found["groups"]} == {
        "night": "settings", "day": "store",
    }  # fmt: skip
    assert "both define the group 'night'" in found["warnings"][0]
    for work in (groups.put("night", {}), groups.remove("night")):
        assert (await refused(work)).code == "group_of_settings"
    settings = with_groups(groups.keys.settings, store.run_now(read_groups))
    assert settings.groups["night"].limits is not None
    assert settings.groups.keys() == {"night", "day"}


@pytest.mark.parametrize(
    ("name", "fields", "told"),
    [
        ("a b", {}, "letters, digits"),
        ("x" * 65, {}, "letters, digits"),
        ("a", {"limits": {"rpm": 0}}, "limits.rpm"),
        ("a", {"rpm": 5}, "rpm"),
        ("a", {"limits": {"budget": "20"}}, "limits.budget"),
    ],
)
async def test_what_is_no_group_is_refused_with_its_field(
    store: Store, name: str, fields: dict[str, Any], told: str
) -> None:
    _, groups = desks(store)
    error = await refused(groups.put(name, fields))
    assert isinstance(error, KeysRefused)
    assert (error.status, told in error.message) == (400, True), error.message


async def test_a_store_holds_a_bounded_number_of_groups(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_groups, "MOST_STORED_GROUPS", 2)
    _, groups = desks(store)
    for name in ("a", "b", "a"):
        await groups.put(name, {})
    assert (await refused(groups.put("c", {}))).code == "too_many_groups"


async def test_a_key_of_an_undefined_group_is_made_with_a_warning(store: Store) -> None:
    keys, groups = desks(store)
    made = await keys.create({"name": "alice", "group": "nigth"})
    assert "nobody" not in made["warnings"][0]
    assert "neither settings nor store define the group 'nigth'" in made["warnings"][0]
    changed = await keys.change("alice", {"limits": {"rpm": 5}})
    assert changed["warnings"] == []
    assert (await keys.change("alice", {"group": "other"}))["warnings"]
    (shown,) = (await groups.list())["groups"]
    assert (shown["name"], shown["origin"], shown["keys"]) == ("other", "undefined", 1)
    await groups.put("night", {})
    assert (await keys.change("alice", {"group": "night"}))["warnings"] == []
    assert "1 keys are still of this group" in (await groups.remove("night"))["warnings"][0]


async def test_where_the_settings_have_groups_a_key_may_be_of_these_or_of_stored_ones(
    store: Store,
) -> None:
    keys, groups = desks(store, groups={"day": {}})
    await groups.put("night", {})
    for group in ("day", "night"):
        assert (await keys.create({"name": group, "group": group}))["warnings"] == []
    error = await refused(keys.create({"name": "c", "group": "nigth"}))
    assert (error.status, error.param) == (400, "group")
    assert "day, night" in error.message


async def test_without_the_store_a_start_knows_the_groups_that_it_knew_last(
    tmp_path: Path,
) -> None:
    store, file = Store(locate_store(f"sqlite:///{tmp_path / 's.db'}", tmp_path)), tmp_path / "k"
    store.start()
    keys, groups = desks(store)
    key = new_key("alice")
    await keys.create({"id": key.id, "sha256": key.sha256, "name": "alice", "group": "night"})
    await groups.put("night", {"limits": {"rpm": 9}})
    sync = KeySync(store, KeyRing(), file)
    await sync.refresh()
    await asyncio.to_thread(store.close, 5.0)
    saved = json.loads(file.read_text())
    assert saved["groups"] == {"night": {"limits": {"rpm": 9}}}

    class Away(Store):
        async def wait_opened(self, seconds: float) -> bool:
            return seconds < 0

        async def run(self, *_: Any, **__: Any) -> Any:
            raise StoreUnavailable("it is away", "")

    later = KeySync(Away(store.location), KeyRing(), file)
    await later.start(0.1)
    assert later.groups == sync.groups
    assert later.members == {"night": 1}


async def test_a_renamed_or_revoked_key_is_called_by_its_last_name(store: Store) -> None:
    keys, _ = desks(store)
    made = await keys.create({"name": "alice"})
    ring = KeyRing()
    sync = KeySync(store, ring, None)
    await sync.refresh()
    assert ring.name_of(made["id"]) == "alice"
    await keys.change("alice", {"name": "Alice B."})
    await sync.refresh()
    assert ring.name_of(made["id"]) == "Alice B."
    await keys.revoke("Alice B.")
    await sync.refresh()
    assert ring.name_of(made["id"]) == "Alice B."
    assert ring.caller(made["id"]) is None
    assert ring.name_of("anonymous:10.0.0.1") is None

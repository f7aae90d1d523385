"""What people do with keys and their groups, and what follows where nobody has defined one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.callers import stored_keys
from gateway.callers.key_desk import KeyDesk
from gateway.callers.keys import KeyRing, new_key
from gateway.callers.standings import Standings
from gateway.callers.stored_keys import (
    KeysRefused,
    KeySync,
    keys_revision,
    put_group,
    read_groups,
    with_groups,
)
from gateway.config.keys import GroupSpec, KeySpec
from gateway.config.settings import Settings
from gateway.errors import GatewayError
from gateway.store.database import locate_store
from gateway.store.failures import StoreUnavailable
from gateway.store.store import Store
from tests.callers.build import NOW
from tests.each_case import each_case


def no_models(_: Sequence[KeySpec]) -> Sequence[str]:
    return ()


def a_desk(store: Store, **settings: Any) -> KeyDesk:
    chosen = Settings.model_validate(settings)
    return KeyDesk(chosen, Standings.alone(chosen, store), no_models)


async def refused(work: Any) -> GatewayError:
    with pytest.raises(GatewayError) as raised:
        await work
    return raised.value


async def test_a_group_is_kept_changed_whole_and_removed(store: Store) -> None:
    desk = a_desk(store)
    fields = {"limits": {"budget": "20/month", "models": ["m"]}, "user_limits": {"rpm": 5}}
    made = await desk.put_group("night", {**fields, "cache": {"isolate": "group"}})
    assert (made["origin"], made["keys"], made["limits"]) == ("store", 0, fields["limits"])
    assert made["cache"] == {"isolate": "group"}
    await desk.put_group("night", {"limits": {"rpm": 9}})
    (shown,) = (await desk.list_groups())["groups"]
    assert (shown["limits"], shown["user_limits"], shown["cache"]) == ({"rpm": 9}, None, None)
    assert (await desk.remove_group("night"))["warnings"] == []
    assert (await desk.list_groups())["groups"] == []
    assert (await refused(desk.remove_group("night"))).status == 404


async def test_a_change_of_a_group_is_a_change_for_those_who_follow_keys(store: Store) -> None:
    ring, changes = KeyRing(), [0]
    sync = KeySync(store, ring, None, on_change=lambda: changes.append(len(sync.groups)))
    await sync.refresh()
    desk = a_desk(store)
    before = store.run_now(keys_revision)
    await desk.put_group("night", {"limits": {"rpm": 9}})
    assert store.run_now(keys_revision) > before
    await sync.refresh()
    assert sync.groups == {"night": GroupSpec.model_validate({"limits": {"rpm": 9}})}
    await desk.remove_group("night")
    await sync.refresh()
    await sync.refresh()
    assert changes[-2:] == [1, 0]


async def test_groups_of_the_settings_come_before_those_of_the_store(store: Store) -> None:
    own = {"night": {"limits": {"rpm": 1}}}
    store.run_now(lambda c: put_group(c, "night", GroupSpec(), NOW))
    store.run_now(lambda c: put_group(c, "day", GroupSpec(), NOW))
    desk = a_desk(store, groups=own)
    found = await desk.list_groups()
    assert {one["name"]: one["origin"] for one in found["groups"]} == {
        "night": "settings", "day": "store",
    }  # fmt: skip
    assert "both define the group 'night'" in found["warnings"][0]
    for work in (desk.put_group("night", {}), desk.remove_group("night")):
        assert (await refused(work)).code == "group_of_settings"
    settings = with_groups(desk.settings, store.run_now(read_groups))
    assert settings.groups["night"].limits is not None
    assert settings.groups.keys() == {"night", "day"}


@each_case(
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
    desk = a_desk(store)
    error = await refused(desk.put_group(name, fields))
    assert isinstance(error, KeysRefused)
    assert (error.status, told in error.message) == (400, True), error.message


async def test_a_store_holds_a_bounded_number_of_groups(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_keys, "MOST_STORED_GROUPS", 2)
    desk = a_desk(store)
    for name in ("a", "b", "a"):
        await desk.put_group(name, {})
    assert (await refused(desk.put_group("c", {}))).code == "too_many_groups"


async def test_a_key_of_an_undefined_group_is_made_with_a_warning(store: Store) -> None:
    desk = a_desk(store)
    made = await desk.create({"name": "alice", "group": "nigth"})
    assert "nobody" not in made["warnings"][0]
    assert "neither settings nor store define the group 'nigth'" in made["warnings"][0]
    changed = await desk.change("alice", {"limits": {"rpm": 5}})
    assert changed["warnings"] == []
    assert (await desk.change("alice", {"group": "other"}))["warnings"]
    (shown,) = (await desk.list_groups())["groups"]
    assert (shown["name"], shown["origin"], shown["keys"]) == ("other", "undefined", 1)
    await desk.put_group("night", {})
    assert (await desk.change("alice", {"group": "night"}))["warnings"] == []
    assert "1 keys are still of this group" in (await desk.remove_group("night"))["warnings"][0]


async def test_where_the_settings_have_groups_a_key_may_be_of_these_or_of_stored_ones(
    store: Store,
) -> None:
    desk = a_desk(store, groups={"day": {}})
    await desk.put_group("night", {})
    for group in ("day", "night"):
        assert (await desk.create({"name": group, "group": group}))["warnings"] == []
    error = await refused(desk.create({"name": "c", "group": "nigth"}))
    assert (error.status, error.param) == (400, "group")
    assert "day, night" in error.message


async def test_without_the_store_a_start_knows_the_groups_that_it_knew_last(
    tmp_path: Path,
) -> None:
    store, file = Store(locate_store(f"sqlite:///{tmp_path / 's.db'}", tmp_path)), tmp_path / "k"
    store.start()
    desk = a_desk(store)
    key = new_key("alice")
    await desk.create({"id": key.id, "sha256": key.sha256, "name": "alice", "group": "night"})
    await desk.put_group("night", {"limits": {"rpm": 9}})
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


async def test_a_key_is_called_by_its_last_name_though_revoked_and_one_that_is_over_expired(
    store: Store,
) -> None:
    desk = a_desk(store)
    await desk.create({"name": "brief", "expires": "1ms"})
    await asyncio.sleep(0.01)
    assert (await desk.show("brief"))["state"] == "expired"
    made = await desk.create({"name": "alice"})
    ring = KeyRing()
    sync = KeySync(store, ring, None)
    await sync.refresh()
    assert ring.name_of(made["id"]) == "alice"
    await desk.change("alice", {"name": "Alice B."})
    await sync.refresh()
    assert ring.name_of(made["id"]) == "Alice B."
    await desk.revoke("Alice B.")
    await sync.refresh()
    assert ring.name_of(made["id"]) == "Alice B."
    assert ring.caller(made["id"]) is None
    assert ring.name_of("anonymous:10.0.0.1") is None

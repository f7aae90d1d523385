"""What is wrong, why, and what to do: a pure function of the state that `admin/live.py` reads.

The most severe problems come first. Nodes that share a host and a state are one problem. Each
remedy names commands that exist; tests/watch/test_problems.py runs their `--help`.
"""

from __future__ import annotations

import enum
import hashlib
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import structlog

from gateway.callers.limits import UsedQuota
from gateway.callers.windows import time_text
from gateway.events import EdgeLost
from gateway.nodes.speed import duration_words
from gateway.schedule.model_placer import UnkeptWish
from gateway.watch.history import RecentTraffic
from gateway.watch.metrics import ClusterSample

MOST_PROBLEMS = 50  # most problems that are told
# Most nodes, requests or groups that one problem names, and most models or quotas that are told one
# by one.
MOST_NAMED = 8
LEADERLESS_SECONDS = 10.0  # without a leader that are none of a mere change of the leader
LOST_EDGE_SECONDS = 600.0  # seconds for which it is a problem that an edge has died
FULL_QUEUE_SHARE = 0.8  # of `queue.max`: from this share on the queue is about to refuse requests
LONG_WAIT_SHARE = 0.5  # of `queue.max_wait`: from this share on the oldest request waits long
# Share of the waiting requests, or of the last minute's, from which on one caller floods.
FLOOD_SHARE = 0.5
LEAST_FLOOD = 8  # fewer requests are no flood
# Share of the last minute's requests that failed from which on that is a problem.
FAILING_SHARE = 0.05
LEAST_FAILED = 3  # fewer failed requests are no problem of the fleet
# Days before the end of a certificate at which that is a warning, and critical.
CERTIFICATE_DAYS, CERTIFICATE_HURRY_DAYS = 14.0, 3.0
# Nodes, and their share of those that tell of their slots, from which on others that take slots are
# a second gateway.
LEAST_OF_OTHERS, OTHERS_SHARE = 2, 0.5
# States of nodes that should work and do not.
OUT_STATES = frozenset({"down", "ejected", "loading"})
# States of nodes that work; a mute one is busy, a sleeping one wakes up for its next request.
USABLE_STATES = frozenset({"ready", "degraded", "mute", "sleeping"})
Rule = Callable[["FleetCondition"], Iterator["Problem"]]
NODES = "llama-gateway nodes"
MODELS = "llama-gateway models"
CHECK = "llama-gateway check"
PROBE_ALL = "llama-gateway check --probe"
CLUSTER = "llama-gateway cluster members"


def find_problems(condition: FleetCondition) -> list[Problem]:
    """The problems of this state, the most severe first; at most `MOST_PROBLEMS`."""
    found = [problem for rule in RULES for problem in rule(condition)]
    found.sort(key=lambda problem: _RANKS[problem.severity])
    return found[:MOST_PROBLEMS]


def _bounded(rule: Rule) -> Rule:
    """Let a rule tell of `MOST_NAMED` problems one by one, and of all others by the next one."""

    def first(state: FleetCondition) -> Iterator[Problem]:
        found = list(rule(state))
        yield from found[:MOST_NAMED]
        for one in found[MOST_NAMED : MOST_NAMED + 1]:
            title = f"{len(found) - MOST_NAMED} more like these: {one.title}"
            yield replace(one, id=one.id.partition(":")[0], title=title)

    return first


def _locked(state: FleetCondition) -> Iterator[Problem]:
    if state.keys_lost is not None:
        yield Problem(
            "keys_lost",
            "Every request is refused: there is no API key left",
            _sentence(state.keys_lost),
            "Put a key into the settings, or restart to serve without any.",
            ("llama-gateway keys hash", CHECK),
            severity=Severity.CRITICAL,
        )


def _fleet_out(state: FleetCondition) -> Iterator[Problem]:
    if state.in_service and not state.usable:
        states = Counter(node.state for node in state.nodes)
        counts = ", ".join(f"{count} {word}" for word, count in sorted(states.items()))
        yield Problem(
            "fleet_out",
            "No node can take work",
            f"Of {state.in_service} nodes none is ready: {counts}.",
            "If all are down it is the network or the machines: ask every node from this machine.",
            (PROBE_ALL, NODES),
            severity=Severity.CRITICAL,
        )


def _models_out(state: FleetCondition) -> Iterator[Problem]:
    if not state.usable:
        return
    for model, (total, usable) in state.models.items():
        if total and not usable:
            yield Problem(
                f"model_out:{model}",
                f"No node serves {model}",
                f"All of its nodes ({total}) are out, so its requests wait, then get 503.",
                "Bring one of its nodes back, or let an alias lead to another model.",
                (NODES, PROBE_ALL),
                severity=Severity.CRITICAL,
            )


@_bounded
def _paused_models(state: FleetCondition) -> Iterator[Problem]:
    for name in sorted(state.paused_models):
        yield Problem(
            f"model_paused:{name}",
            f"The model {name} is paused",
            "An operator paused it: each of its requests gets 503 model_paused, also after a "
            "restart.",
            "Resume it when you are done; the audit log says who paused it.",
            (
                f"llama-gateway models resume {shlex.quote(name)}",
                f"llama-gateway audit --action models.pause --target {shlex.quote(name)}",
            ),
        )


@_bounded
def _differing_models(state: FleetCondition) -> Iterator[Problem]:
    for name, differences in state.differing_models.items():
        yield Problem(
            f"model_differs:{name}",
            f"The nodes of {name} differ",
            f"{'. '.join(differences)}.",
            "If it is on purpose, do nothing, or give each kind a public name of its own (model "
            "in nodes.yaml). Else start these nodes' servers with the same file, build and "
            "options: until then a request's answer depends on its node, and a stream can't move "
            "to a node that differs.",
            (MODELS, CHECK),
            severity=Severity.NOTICE,
        )


def _out_nodes(state: FleetCondition) -> Iterator[Problem]:
    groups: dict[tuple[str, str], list[NodeCondition]] = defaultdict(list)
    for node in state.nodes:
        if node.state in OUT_STATES:
            groups[node.host, node.state].append(node)
    for (host, word), nodes in groups.items():
        names = _names(nodes)
        whole = sum(node.model is None for node in nodes)  # the others are models of routers
        lost = whole / max(1, state.in_service)
        severity = Severity.CRITICAL if lost >= 0.5 else Severity.WARNING
        if word == "loading":
            severity = Severity.NOTICE
        remedy, commands = _OUT_REMEDIES[word]
        yield Problem(
            f"{word}:{host}:{names[0]}",
            f"{names[0]} is {word}"
            if len(nodes) == 1
            else f"{len(nodes)} nodes of {host} are {word}",
            _reasons(nodes),
            remedy,
            tuple(command.format(nodes=_selection(nodes)) for command in commands),
            names,
            severity=severity,
        )


_OUT_REMEDIES = {
    "down": (
        (
            "Look at the machine and the server's log. A node returns by itself as soon as it "
            "answers; the others serve its load meanwhile."
        ),
        ("llama-gateway nodes probe {nodes}", PROBE_ALL),
    ),
    "ejected": (
        (
            "Its requests failed through its own fault: read its server's log. One request is "
            "tried on it from time to time; once it is mended, a probe brings it back at once."
        ),
        ("llama-gateway nodes probe {nodes}",),
    ),
    "loading": (
        "Wait: minutes are normal for a large model on a slow disk.",
        ("llama-gateway nodes",),
    ),
}


def _slow_nodes(state: FleetCondition) -> Iterator[Problem]:
    for node in state.nodes:
        if node.state == "degraded":
            yield Problem(
                f"degraded:{node.name}",
                f"{node.name} is far slower than it was",
                _sentence(node.reason),
                "Look on its host for swapping, another process, a low CPU frequency or heat. It "
                "gets as much work as its speed deserves; drain it to get none.",
                (f"llama-gateway nodes drain {shlex.quote(node.name)} --wait",),
                (node.name,),
            )


@_bounded
def _failed_loads(state: FleetCondition) -> Iterator[Problem]:
    for node in [node for node in state.nodes if node.load_failures]:
        router = node.name.partition("/")[0]
        yield Problem(
            f"load_failed:{node.name}",
            f"{router} could not load {node.model}",
            f"{_sentence(node.reason)} Failed loads in a row: {node.load_failures}. Its requests "
            "go to other nodes that have it, or wait.",
            "Read the router's log: a file that is cut short, too little memory and an "
            "architecture that its build does not know are the usual causes. It is tried again, "
            "each time after longer; once it is mended, load it by hand, which is tried at once.",
            (f"llama-gateway models load {shlex.quote(node.model or '')} {shlex.quote(router)}",),
            (node.name,),
        )


def _second_gateway(state: FleetCondition) -> Iterator[Problem]:
    number = len(state.used_by_others)
    # One who uses a node directly is no second gateway, which takes slots wherever there are some.
    if number >= LEAST_OF_OTHERS and number >= OTHERS_SHARE * state.tell_slots:
        yield Problem(
            "second_gateway",
            "A second gateway seems to use the nodes",
            f"On {_part(number, state.tell_slots)} nodes slots were busy in half of the last "
            "minutes that this gateway had not given out.",
            "Let one gateway serve, and the other wait until that is down (active and standby), or "
            "write other nodes into its nodes.yaml: two that do not know of each other send "
            "requests to slots that are taken. The same holds for clients that use nodes directly.",
            (NODES,),
            tuple(state.used_by_others[:MOST_NAMED]),
        )


def _routers_left_alone(state: FleetCondition) -> Iterator[Problem]:
    for node in state.nodes:
        if node.left_alone:
            yield Problem(
                f"left_alone:{node.name}",
                f"{node.name} gets no commands: others load and unload its models too",
                "Again and again it has loaded and unloaded models that this gateway had not "
                "ordered. Requests go to what it has loaded, and nothing is loaded for them there.",
                "Let one gateway command it: write models_on_demand: false for it in nodes.yaml of "
                "all others, and let clients ask for its models here alone. Then probe it: that "
                "ends the pause, which lasts half an hour else.",
                (f"llama-gateway nodes probe {shlex.quote(node.name)}",),
                (node.name,),
            )


@_bounded
def _unkept_wishes(state: FleetCondition) -> Iterator[Problem]:
    for wish in state.unkept:
        model, where = shlex.quote(wish.model), shlex.quote(wish.node)
        yield Problem(
            f"not_kept:{wish.model}:{wish.node}",
            f"{wish.model} is pinned to {wish.node}, which has not loaded it"
            if wish.node
            else f"Too few copies of {wish.model} are loaded",
            _sentence(wish.why),
            "Make room: unload or unpin another model there, write more memory for the host if it "
            "has more, or take the pin or replicas.min back.",
            (MODELS, f"llama-gateway models load {model} {where}" if wish.node else NODES),
            (wish.node,) if wish.node else (),
        )


def _drifted_nodes(state: FleetCondition) -> Iterator[Problem]:
    for node in state.nodes:
        if node.drift:
            yield Problem(
                f"drift:{node.name}",
                f"{node.name} differs from the inventory",
                _sentence("; ".join(node.drift)),
                "Start its server with the right model, or correct its entry in nodes.yaml, which "
                "is read again when it changes.",
                (CHECK, PROBE_ALL),
                (node.name,),
            )


def _failed_starts(state: FleetCondition) -> Iterator[Problem]:
    for node in state.nodes:
        if node.start_failures:
            yield Problem(
                f"start:{node.name}",
                f"{node.name} could not be started",
                _sentence(node.reason),
                "Run its start hook by hand and read what it prints; the gateway tries it again.",
                (NODES,),
                (node.name,),
            )


def _drained_nodes(state: FleetCondition) -> Iterator[Problem]:
    drained = [node for node in state.nodes if node.state == "draining"]
    if not drained:
        return
    yield Problem(
        "draining",
        f"{drained[0].name} is drained"
        if len(drained) == 1
        else f"{len(drained)} nodes are drained",
        "An operator took them out: they get no new requests, also after a restart.",
        f"Resume them when you are done; of many, the command takes those of {MOST_NAMED} hosts.",
        (f"llama-gateway nodes resume {_selection(drained)}", NODES),
        _names(drained),
        severity=Severity.NOTICE,
    )


def _full_queue(state: FleetCondition) -> Iterator[Problem]:
    queue, refused = state.queue, state.traffic.refused
    turned_away = refused.get("queue_full", 0) + refused.get("queue_timeout", 0)
    is_full = queue.most > 0 and queue.waiting >= FULL_QUEUE_SHARE * queue.most
    waits_long = queue.oldest_seconds >= LONG_WAIT_SHARE * queue.most_wait
    if not (is_full or waits_long or turned_away) or not (queue.waiting or turned_away):
        return
    cause = f"{queue.waiting} of at most {queue.most} requests wait, the oldest for "
    cause += f"{duration_words(queue.oldest_seconds)}"
    if turned_away:
        cause += f"; {turned_away} were refused within a minute (429 or 503)"
    yield Problem(
        "queue",
        "More work than slots: requests wait long"
        if not turned_away
        else "More work than slots: requests are refused",
        f"{cause}.",
        "Bring back nodes that are out, add one, bound max_tokens by model, or lower "
        "queue.max_wait so that clients learn early. The dashboard and llama-gateway top can "
        "cancel what waits.",
        (NODES, "llama-gateway usage --by key --since 1h"),
        severity=Severity.CRITICAL if is_full or turned_away else Severity.WARNING,
    )


def _flooding_caller(state: FleetCondition) -> Iterator[Problem]:
    queue, traffic = state.queue, state.traffic
    if max(queue.callers, len(traffic.callers)) < 2:
        return  # A caller alone takes nothing from others.
    caller, limited = next(iter(traffic.limited.most_common(1)), (None, 0))
    title = "One caller sends more than its limits allow"
    cause = f"Of the {traffic.requests} requests of the last minute its limits refused {limited}"
    is_flood = queue.top_waiting >= max(LEAST_FLOOD, FLOOD_SHARE * queue.waiting)
    if is_flood:
        caller, title = queue.top_caller, "One caller floods the queue"
        cause = f"{_part(queue.top_waiting, queue.waiting)} waiting requests are its own"
    if caller is None or not (is_flood or limited >= LEAST_FLOOD):
        return
    show, where = "llama-gateway keys show {name}", "by keys set"
    commands: tuple[str, ...] = (show, "llama-gateway keys set {name} --rpm 60")
    if caller in state.settings_keys:
        where, commands = "in gateway.yaml, at its entry of keys", (show, CHECK)
    if caller.startswith(("anonymous:", "playground:")):
        remedy = "Give callers keys, so that each has a limit."
        commands = ("llama-gateway keys create --name NAME --rpm 60",)
    elif not is_flood:
        remedy = "It has reached a limit of its key or group, which holds: tell its user to send "
        remedy += "less, or to wait as Retry-After says. If it should have more, raise the limit "
        remedy += f"{where}."
        commands = (show,)
    else:
        remedy = f"Give its key a limit (rpm) {where}, or end the key."
    yield Problem(
        "flood",
        title,
        f"{_sentence(cause)} Others still get their turn: callers share the queue fairly.",
        remedy,
        tuple(line.format(name=shlex.quote(caller)) for line in commands),
        caller=caller,
        caller_name=state.name_of(caller),
        anonymous_commands=tuple(line.format(name="NAME") for line in commands),
    )


_QUOTA_OWNERS = {
    "key": ("A key has", "llama-gateway keys show {}"),
    "group": ("A group has", "llama-gateway groups list"),
    "total": ("All callers together have", "llama-gateway usage --by key --since 1d"),
}


@_bounded
def _used_quotas(state: FleetCondition) -> Iterator[Problem]:
    for one in state.quotas:
        of, limit, period, most, used, _, resets_at = one.standing
        owner, show = _QUOTA_OWNERS[of]
        what = f"the {'money' if limit == 'budget' else 'tokens'} of the {period}"
        cause = f"{used:.10g} of {most:.10g} are used; the next {period} begins at "
        cause += f"{time_text(resets_at or 0.0)}."
        if one.spent:
            cause += " Requests that do not fit get 429 insufficient_quota until then."
        # Its id must not tell viewers whose it is.
        digest = hashlib.sha256(one.name.encode()).hexdigest()[:12]
        yield Problem(
            f"quota:{of}:{limit}:{period}:{digest}",
            f"{owner} used up {what}" if one.spent else f"{owner} used {one.share:.0%} of {what}",
            cause,
            f"Nothing, if that is the limit's purpose. Else raise the limit ({limit}).",
            (show.format(shlex.quote(one.id)),),
            caller=one.id if of == "key" else f"group {one.id}" if one.id else None,
            caller_name=state.name_of(one.id) if of == "key" else None,
            anonymous_commands=(show.format("NAME"),),
            severity=Severity.WARNING if one.spent else Severity.NOTICE,
        )


def _undefined_groups(state: FleetCondition) -> Iterator[Problem]:
    groups = state.undefined_groups
    if not groups:
        return
    shown = _listed([f"{name} ({_count(keys, 'key')})" for name, keys in groups.items()])
    first = shlex.quote(next(iter(groups)))
    yield Problem(
        "groups_undefined",
        f"Keys are of groups that nobody has defined, and so without a limit: {len(groups)}",
        "Keys name groups that neither the settings nor the store define; the release after this "
        "one refuses such keys.",
        "Define each, with or without limits, or take its keys out of it.",
        (f"llama-gateway groups set {first} --rpm 600", "llama-gateway groups list"),
        caller=f"group {shown}",
        anonymous_commands=("llama-gateway groups list",),
    )


def _spent_budget(state: FleetCondition) -> Iterator[Problem]:
    if state.spill is None or state.spill["money"] is None:
        return
    paid, money, window = (state.spill[name] for name in ("paid", "money", "window"))
    reserved = money if state.spill["reserved"] is None else state.spill["reserved"]
    if paid + reserved < money:
        return
    yield Problem(
        "gpu_budget",
        "The GPU budget is spent",
        f"{paid:.2f} paid and {reserved:.2f} reserved of {money:.2f} within "
        f"{duration_words(window)}: requests that would spill over wait for CPU nodes.",
        "Nothing, if that is the budget's purpose: it frees itself as the window moves on. Else "
        "raise hybrid.spill.money_per_hour in the settings.",
        ("llama-gateway usage --by tier --since 1d", CHECK),
    )


def _failing_requests(state: FleetCondition) -> Iterator[Problem]:
    traffic = state.traffic
    if traffic.failed < LEAST_FAILED or traffic.failed < FAILING_SHARE * traffic.requests:
        return
    cause = (
        f"{traffic.failed} of the {traffic.requests} requests of the last minute got a 5xx "
        "from nodes or the gateway"
    )
    reasons, nodes = Counter[str](), Counter[str]()
    for (reason, node), count in traffic.failures.items():
        reasons[reason] += count
        nodes[node] += count
    del nodes[""]
    for reason, count in reasons.most_common(1):
        cause += f"; the most frequent reason is {reason} ({count} times)"
    worst = nodes.most_common(1)
    for node, count in worst:
        cause += f"; {node} was the last node of {count}"
    yield Problem(
        "failing",
        "Requests fail",
        f"{cause}.",
        "The log names each attempt of a failed request, its node and the reason.",
        (
            "journalctl -u llama-gateway -n 200",
            *(f"llama-gateway nodes probe {shlex.quote(node)}" for node, _ in worst),
            NODES,
        ),
        tuple(node for node, _ in worst),
        severity=Severity.CRITICAL,
    )


def _store_problems(state: FleetCondition) -> Iterator[Problem]:
    store, ledger = state.store, state.ledger
    if store.get("state") not in {None, "off", "up", "opening", "closed"}:
        yield Problem(
            "store",
            "The store can't be used",
            _sentence(str(store.get("error") or store.get("state")))
            + " Requests go on; what they use is recorded later, as far as memory reaches.",
            _sentence(str(store.get("remedy") or "The log names the cause")),
            ("journalctl -u llama-gateway -n 200", "df -h"),
        )
    if ledger is not None and ledger.get("dropped"):
        yield Problem(
            "ledger",
            "The ledger has lost rows",
            f"{ledger['dropped']} requests since the start are in no report."
            + (f" {_sentence(str(ledger['error']))}" if ledger.get("error") else ""),
            "Mend the store; the log says how many rows each time.",
            ("journalctl -u llama-gateway -n 200",),
        )
    if state.audit_lost:
        yield Problem(
            "audit",
            "The audit log has gaps",
            f"{state.audit_lost} changes could not be written to the store.",
            "Mend the store; the process's log has every change as well.",
            ("journalctl -u llama-gateway -n 200",),
        )


def _full_storage(state: FleetCondition) -> Iterator[Problem]:
    storage = state.storage
    if storage.error is not None:
        waiting = f" {storage.results} results wait to be written." if storage.results else ""
        yield Problem(
            "storage",
            "There is no room for files and results: batches wait, uploads are refused"
            if storage.is_full
            else "The folder of files and results can't be used: batches wait, uploads are refused",
            f"{_sentence(storage.error)}{waiting} Chats go on, and nothing that was kept is lost.",
            "Free space on the disk of batches.folder, or raise batches.folder_bytes in the "
            "settings; batches go on by themselves."
            if storage.is_full
            else "Mend the folder that batches.folder names; batches go on by themselves.",
            ("df -h", "journalctl -u llama-gateway -n 200", CHECK),
        )
    callers = storage.full_callers
    if callers:
        yield Problem(
            "key_storage",
            "Batches of one caller wait: it keeps as much as it may"
            if len(callers) == 1
            else f"Batches of {len(callers)} callers wait: they keep as much as each may",
            "What its files and results take has come to batches.bytes_per_key.",
            "Let it delete files that it has read, or raise batches.bytes_per_key in the settings.",
            (CHECK, "journalctl -u llama-gateway -n 200"),
            caller=callers[0],
            caller_name=state.name_of(callers[0]),
            severity=Severity.NOTICE,
        )


def _file_errors(state: FleetCondition) -> Iterator[Problem]:
    for id_, name, error in (
        ("inventory_error", "nodes.yaml", state.inventory_error),
        ("settings_error", "gateway.yaml", state.settings_error),
    ):
        if error is not None:
            yield Problem(
                id_,
                f"{name} has an error: the gateway runs as before the edit",
                _sentence(error),
                "Correct the file; it is read again when it changes.",
                (CHECK,),
            )
    if state.certificate_error is not None:
        yield Problem(
            "certificate_error",
            "A renewed certificate can't be used; the old one is still served",
            _sentence(state.certificate_error),
            "Put the right pair of certificate and key in place; both are read again.",
            (CHECK,),
        )
    for key, days in state.certificates.items():
        if days < CERTIFICATE_DAYS:
            hurry = days < CERTIFICATE_HURRY_DAYS
            when = f"expires in {days:.1f} days" if days > 0 else "has expired"
            yield Problem(
                f"certificate:{key}",
                f"The certificate of {key} {when}",
                "Nobody has renewed its files.",
                "Renew the files that this setting names; no restart is needed.",
                ("openssl x509 -noout -enddate -in FILE",),
                severity=Severity.CRITICAL if hurry else Severity.WARNING,
            )


def _lost_edges(state: FleetCondition) -> Iterator[Problem]:
    lost = state.lost_edges
    if not lost:
        return
    broken = [request for edge in lost for request in edge.requests]
    yield Problem(
        "edge_died",
        f"{_count(len(lost), 'edge')} died in the last {duration_words(LOST_EDGE_SECONDS)}",
        f"The last one was '{lost[-1].edge}' ({lost[-1].reason}). "
        f"{_count(len(broken), 'request')} broke off: {_listed(broken) or 'none'}.",
        "It was started again. Its last words are in the log; if the machine killed it, memory is "
        "short.",
        ("journalctl -u llama-gateway -n 200", "journalctl -k -n 50"),
    )


def _cluster(state: FleetCondition) -> Iterator[Problem]:
    cluster = state.cluster
    if cluster is None:
        return
    if cluster.role == "limbo" and cluster.role_seconds >= LEADERLESS_SECONDS:
        yield Problem(
            "no_leader",
            f"No member of the cluster {cluster.name} leads, as far as {cluster.member} knows",
            f"For {duration_words(cluster.role_seconds)} new requests here have waited, then got "
            "503.",
            "See that this machine reaches the store and the other members, and that one of them "
            "runs: whoever has the store leads within seconds.",
            (CLUSTER, "journalctl -u llama-gateway -n 50"),
            severity=Severity.CRITICAL,
        )
    if cluster.role == "alone":
        yield Problem(
            "alone",
            f"{cluster.member} is alone: it reaches neither a leader nor the store",
            "It serves its own clients within its share of each node's slots and of each limit, "
            "for an hour at most. Batches, and loads of models, wait.",
            "Bring the store back, or the network to it. The cluster is whole again within "
            "seconds, without a restart.",
            (CLUSTER, "journalctl -u llama-gateway -n 50"),
            severity=Severity.CRITICAL,
        )
    if cluster.lost:
        yield Problem(
            "member_lost",
            f"The leader does not hear of {', '.join(cluster.lost[:MOST_NAMED])}",
            "It has died, or the network between them is cut. Its share of the slots stays its "
            "own for an hour, in case that it is alone.",
            "Start it again. If its process has surely ended and can't be started now, remove it: "
            "then the others have its share at once. It registers again when it starts.",
            (CLUSTER, "llama-gateway cluster remove NAME"),
        )
    if cluster.apart:
        yield Problem(
            "files_apart",
            "Members of the cluster keep callers' files in different folders: "
            + ", ".join(cluster.apart[:MOST_NAMED]),
            "What was uploaded while one member led, its batches and stored responses wait while "
            "another one leads that has not that folder.",
            "Give all members one shared folder (batches.folder), such as one of NFS.",
            ("llama-gateway nodes", CHECK),
        )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _names(nodes: Sequence[NodeCondition]) -> tuple[str, ...]:
    return tuple(node.name for node in nodes[:MOST_NAMED])


def _listed(names: Sequence[str]) -> str:
    """The first of these names, and how many there are besides."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


RULES = (
    _locked, _cluster, _fleet_out, _models_out, _failing_requests, _paused_models, _full_queue,
    _out_nodes, _failed_loads, _second_gateway, _routers_left_alone, _unkept_wishes, _slow_nodes,
    _drifted_nodes, _flooding_caller, _spent_budget, _used_quotas, _undefined_groups,
    _store_problems, _full_storage, _file_errors, _failed_starts, _lost_edges, _drained_nodes,
    _differing_models,
)  # fmt: skip
"""In the order in which problems of one severity are shown."""


def _selection(nodes: Sequence[NodeCondition]) -> str:
    """These nodes as `llama-gateway nodes` takes them: by name, or if they are many, by host."""
    words = [node.name for node in nodes]
    if len(nodes) > MOST_NAMED:
        hosts = list(dict.fromkeys(node.host for node in nodes))[:MOST_NAMED]
        words = [word for host in hosts for word in ("--host", host)]
    return shlex.join(words)


def _reasons(nodes: Sequence[NodeCondition]) -> str:
    first = nodes[0].reason
    others = sum(node.reason != first for node in nodes)
    more = f" ({others} of them: other reasons)" if others else ""
    return f"{_sentence(first)}{more}" if first else "No reason is known."


def _sentence(text: str) -> str:
    text = text.strip()
    if not text:
        return ""
    return text[0].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def _part(number: int, total: int) -> str:
    return f"all {total}" if number == total else f"{number} of the {total}"


class Severity(enum.Enum):
    """How soon somebody should act."""

    CRITICAL = "critical"  # requests fail, or will within minutes
    WARNING = "warning"  # the fleet works, with less than it should have
    NOTICE = "notice"  # nothing is broken; somebody may have forgotten it


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that an operator should know, and what to do about it."""

    id: str  # the same for as long as it lasts
    title: str
    cause: str
    remedy: str
    commands: tuple[str, ...] = ()  # command lines of the remedy
    nodes: tuple[str, ...] = ()  # the first of the nodes that it is about
    caller: str | None = None  # the caller that it is about; for operators only
    caller_name: str | None = None  # the name of its key; likewise
    anonymous_commands: tuple[str, ...] | None = None
    """`commands` for those who may not know the caller; None: they do not name it."""
    severity: Severity = Severity.WARNING

    def as_json(self, *, may_name_callers: bool) -> dict[str, Any]:
        """As the admin API shows it."""
        shown = {name: getattr(self, name) for name in _SHOWN} | {"severity": self.severity.value}
        if not may_name_callers:
            shown |= {"caller": None, "caller_name": None}
            shown["commands"] = self.anonymous_commands or self.commands
        return shown


_SHOWN = (
    *("id", "severity", "title", "cause", "remedy", "commands", "nodes", "caller", "caller_name"),
)


# Seconds for which a problem must be away to be over: some come and go around a limit.
OVER_SECONDS = 5.0
_RANKS = {severity: rank for rank, severity in enumerate(Severity)}
log = structlog.get_logger()


@dataclass(slots=True)
class ProblemLog:
    """Compares the problems of each look with those that were told. `clock` is monotonic."""

    clock: Callable[[], float]
    _told: dict[str, tuple[Problem, float, float]] = field(default_factory=dict)
    """By id, since when it is there, and when it was seen: those that have just gone as well."""

    def take(self, problems: Sequence[Problem]) -> None:
        """Tell what has changed; `problems` are all that there are now."""
        now = self.clock()
        for problem in problems:
            told, since, _ = self._told.get(problem.id, (None, now, now))
            if told is None or _RANKS[problem.severity] < _RANKS[told.severity]:
                told = problem
                _tell(problem)
            self._told[problem.id] = (told, since, now)
        for id_, (told, since, seen_at) in [*self._told.items()]:
            if now - seen_at >= OVER_SECONDS:
                del self._told[id_]
                seconds = round(seen_at - since, 1)
                log.info("problem is over", id=id_, title=told.title, seconds=seconds)


def _tell(problem: Problem) -> None:
    told = problem.as_json(may_name_callers=True)
    # As texts, whose control characters the log escapes: nodes and callers name themselves.
    told |= {"commands": "; ".join(problem.commands), "nodes": ", ".join(problem.nodes)}
    level = log.info if problem.severity is Severity.NOTICE else log.warning
    level("problem", **{name: value for name, value in told.items() if value})


@dataclass(frozen=True, slots=True)
class NodeCondition:
    """A node that is not simply at work."""

    name: str
    host: str
    state: str
    reason: str
    drift: Sequence[str] = ()  # how its server differs from the inventory
    start_failures: int = 0  # of a standby node: starts in a row that failed
    left_alone: bool = False  # of a router: whether others command it too
    model: str | None = None  # of a router's model: its public name
    load_failures: int = 0  # likewise: loads in a row that failed, of which `reason` tells


@dataclass(frozen=True, slots=True)
class QueueCondition:
    """The requests that wait."""

    waiting: int = 0
    most: int = 256  # `queue.max`
    oldest_seconds: float = 0.0
    most_wait: float = 300.0  # `queue.max_wait` in seconds
    top_caller: str | None = None  # whose requests most places hold
    top_waiting: int = 0
    callers: int = 0  # how many callers wait, as far as was counted


@dataclass(frozen=True, slots=True)
class StorageCondition:
    """The folder of files and results, while it can't take what callers and batches have for it."""

    error: str | None = None  # why not, and what to do; None: it takes everything
    is_full: bool = False  # whether that is for want of room
    results: int = 0  # results of batches that wait to be written
    full_callers: Sequence[str] = ()
    """Callers whose batches wait, since they keep as much as each may."""


@dataclass(frozen=True, slots=True)
class FleetCondition:
    """The state from which problems are found."""

    nodes: Sequence[NodeCondition] = ()  # those that are not simply at work
    in_service: int = 0  # nodes that should work
    usable: int = 0  # of them, nodes that do
    tell_slots: int = 0  # of these, nodes that tell which of their slots are busy
    used_by_others: Sequence[str] = ()  # of these, nodes of which others take slots all the time
    models: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Of each model how many nodes in service serve it, and how many of these are usable."""
    paused_models: Collection[str] = ()  # public names that an operator has paused
    unkept: Sequence[UnkeptWish] = ()
    differing_models: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By public name: how the nodes that serve it differ, in words."""
    queue: QueueCondition = QueueCondition()
    traffic: RecentTraffic = field(default_factory=RecentTraffic)
    settings_keys: Collection[str] = ()  # the ids of the keys in the settings
    name_of: Callable[[str], str | None] = lambda _: None  # the name of the key with this id
    quotas: Sequence[UsedQuota] = ()  # the fullest first
    undefined_groups: Mapping[str, int] = field(default_factory=dict)
    """How many keys are of each group that nobody has defined."""
    spill: Mapping[str, Any] | None = None
    """`paid`, `reserved`, `money` and `window` of spill-over to the GPU tier, if there is one."""
    inventory_error: str | None = None
    settings_error: str | None = None
    keys_lost: str | None = None
    certificate_error: str | None = None
    certificates: Mapping[str, float] = field(default_factory=dict)
    """Days left, by the listener's setting."""
    store: Mapping[str, Any] = field(default_factory=dict)
    """`state`, `error` and `remedy` of the store."""
    ledger: Mapping[str, Any] | None = None  # `dropped` and `error` of the ledger
    audit_lost: int = 0
    storage: StorageCondition = StorageCondition()
    lost_edges: Sequence[EdgeLost] = ()  # of the last `LOST_EDGE_SECONDS`, the latest last
    cluster: ClusterSample | None = None  # None: the gateway belongs to none

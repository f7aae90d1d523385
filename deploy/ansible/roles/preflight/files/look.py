"""Inspects a host before any change, and finds what would make the play fail.

Run by vars/main.yml; its argument is a JSON object with the roles' requirements. Writes a JSON
object with its findings, and in `problems` sentences that name the variable and the remedy. Changes
nothing and needs only Python's standard library.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pwd
import re
import socket
import subprocess
import sys
import types
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

GIB = 1 << 30
HEADER = re.compile(rb"^(?:#!.*\n)?# Managed by Ansible.* sha256:([0-9a-f]{64})\n")
LISTENING = "0A"  # include/net/tcp_states.h
REFUSES_HEAD = (403, 405, 501)
TIMEOUT = 20.0  # seconds, for a program and for a web server


def main(spec: dict[str, Any]) -> dict[str, Any]:
    """Inspect everything that the specification names."""
    problems = machine_problems(spec)
    if problems:  # the other findings would mean little
        return {"problems": problems}
    found = {
        "address": own_address(),
        "architecture": os.uname().machine,
        "units": {name: look_at_unit(name) for name in unit_names(spec)},
        "problems": problems,
    }
    if spec.get("marks"):
        found["marks"] = sorted(path.name for path in Path("/").glob(spec["marks"].lstrip("/")))
    if spec.get("published"):
        found["published"] = published(Path(spec["published"]))
    problems += port_problems(spec.get("ports", []), spec.get("addresses", []))
    problems += file_problems(spec)
    model = spec.get("model")
    found["model"] = look_at_model(model, problems) if model else None
    found["models"] = [
        {"path": one["path"], **look_at_model(one, problems)} for one in spec.get("models", [])
    ]
    wanted = disks(spec, found["model"]) + disks_on_demand(spec, found["models"])
    problems += disk_problems(wanted)
    if spec.get("sources"):
        found["topology"] = topology(spec["sources"])
        problems += numa_problems(spec, found["topology"])
        if model and not problems:
            problems += memory_problems(spec, found)
        if found["models"] and not problems:
            problems += memory_problems_on_demand(spec, found)
    return found


def machine_problems(spec: dict[str, Any]) -> list[str]:
    """Problems that rule out every role."""
    problems = []
    least = tuple(spec.get("python", [3, 11]))
    if sys.version_info[:2] < least:
        problems.append(
            f"Python {sys.version.split()[0]} is too old. Remedy: Debian 12, Ubuntu 24.04 or "
            f"newer, with Python {'.'.join(map(str, least))}"
        )
    if not Path("/run/systemd/system").is_dir():
        problems.append("systemd does not run here. Remedy: a machine (or container) booted by it")
    release = Path("/etc/os-release")
    words = release.read_text() if release.is_file() else ""
    if not re.search(r"^ID(_LIKE)?=.*\b(debian|ubuntu)\b", words, re.MULTILINE):
        problems.append(
            "this is neither Debian nor Ubuntu. Remedy: take the host out of the inventory"
        )
    if os.geteuid() != 0:
        problems.append("the play is not root here. Remedy: ansible_become, or ansible_user=root")
    return problems


def own_address() -> str:
    """The address that this host is reached by, by its default route; loopback without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            return "127.0.0.1"
        return sock.getsockname()[0]


def unit_names(spec: dict[str, Any]) -> list[str]:
    """The units of the specification, and those of the folder that match its pattern."""
    names = list(spec.get("units", []))
    pattern = spec.get("unit_pattern")
    if pattern:
        names += [path.name for path in Path("/etc/systemd/system").glob(pattern)]
    return sorted(set(names))


def look_at_unit(name: str) -> dict[str, Any]:
    """A service by systemd and /proc."""
    told = run("systemctl", "show", "-p", "ActiveState,MainPID,LoadState", name)
    words = dict(line.split("=", 1) for line in told.splitlines() if "=" in line)
    pid = int(words.get("MainPID", 0))
    return {
        "loaded": words.get("LoadState") == "loaded",
        "state": words.get("ActiveState", "inactive"),
        "digest": environment(pid).get("LLAMA_NODE_DIGEST", ""),
        "keys": environment(pid).get("LLAMA_NODE_KEYS", ""),
        "memory": own_memory(pid),
    }


def published(path: Path) -> list[dict[str, Any]]:
    """The servers that the last run published."""
    try:
        told = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    servers = told.get("servers") if isinstance(told, dict) else None
    return servers if isinstance(servers, list) else []


def environment(pid: int) -> dict[str, str]:
    """The variables that a process was started with."""
    try:
        pairs = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def own_memory(pid: int) -> int:
    """Bytes that this process and its children free when they end: private memory, or locked."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith("kB")}
    own = 1024 * max(int(sizes.get("RssAnon", 0)), int(sizes.get("VmLck", 0)))
    children: list[str] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):  # each thread has its own
        with contextlib.suppress(OSError):
            children += listed.read_text().split()
    # A router has a child for each model that it has loaded.
    return own + sum(map(own_memory, map(int, children)))


def port_problems(ports: list[dict[str, Any]], addresses: list[dict[str, Any]]) -> list[str]:
    """Ports that other programs listen on, and addresses that aren't this host's."""
    problems = []
    listeners = listening()
    for wanted in ports:
        for pid, name, unit in listeners.get(wanted["port"], []):
            if unit not in wanted["units"]:
                problems.append(
                    f"port {wanted['port']} ({wanted['variable']}) is in use by {name} "
                    f"(pid {pid}). Remedy: stop it, or set {wanted['variable']} to a free port"
                )
    for wanted in addresses:
        try:
            found = socket.getaddrinfo(wanted["address"], 0, type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = found[0]
            with socket.socket(family, kind, protocol) as sock:
                sock.bind(address)
        except OSError as error:
            problems.append(
                f"{wanted['address']} ({wanted['variable']}) is not an address of this host: "
                f"{error.strerror}. Remedy: set {wanted['variable']} to one that is"
            )
    return problems


def listening() -> dict[int, list[tuple[int, str, str]]]:
    """Port -> (pid, program, unit) of each process that listens on it."""
    inodes = {}
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == LISTENING:
                inodes[words[9]] = int(words[1].rpartition(":")[2], 16)
    found = {port: [] for port in inodes.values()}
    for home in Path("/proc").glob("[0-9]*"):
        try:
            targets = {str(entry.readlink()) for entry in (home / "fd").iterdir()}
            name = (home / "comm").read_text().strip()
            groups = (home / "cgroup").read_text()
        except OSError:
            continue
        unit = re.search(r"/([^/\n]+\.(?:service|socket))", groups)
        for inode in {target[8:-1] for target in targets if target.startswith("socket:[")}:
            if inode in inodes:
                found[inodes[inode]].append((int(home.name), name, unit.group(1) if unit else ""))
    return {port: who or [(0, "an unknown program", "")] for port, who in found.items()}


def file_problems(spec: dict[str, Any]) -> list[str]:
    """Files that were edited by hand since the last run, or not written by the role."""
    if spec.get("overwrite"):
        return []
    paths = [Path(name) for name in spec.get("files", [])]
    pattern = spec.get("unit_pattern")
    if pattern:
        paths += sorted(Path("/etc/systemd/system").glob(pattern))
    problems = []
    for path in paths:
        if not path.is_file() or leads_into(path, spec.get("links")):
            continue
        words = path.read_bytes()
        header = HEADER.match(words)
        if not header and as_packaged(words, str(path), spec.get("packages", [])):
            continue
        if header and hashlib.sha256(words[header.end() :]).hexdigest().encode() == header.group(1):
            continue
        what = "was edited by hand since the last run" if header else "was not written by this role"
        problems.append(
            f"{path} {what}. Remedy: put the change into {spec['files_variable']}, then run with "
            f"-e {spec['overwrite_variable']}=true to have the file written anew"
        )
    return problems


def leads_into(path: Path, folder: str | None) -> bool:
    """Whether a path is a link to something of the role's own, which may be replaced."""
    return folder is not None and path.is_symlink() and path.readlink().is_relative_to(folder)


def as_packaged(words: bytes, path: str, packages: list[str]) -> bool:
    """Whether a configuration file is unchanged since one of these packages installed it."""
    told = run("dpkg-query", "--show", "--showformat=${Conffiles}\n", *packages)
    digest = hashlib.md5(words, usedforsecurity=False).hexdigest()
    return [path, digest] in [line.split()[:2] for line in told.splitlines()]


def look_at_model(model: dict[str, Any], problems: list[str]) -> dict[str, Any]:
    """Whether the model is there and verified; else its size and the bytes still missing."""
    path = Path(model["path"])
    record = Path(f"{path}.verified")
    try:
        stat = path.stat()
        verified = record.read_text() == f"{model['sha256']} {stat.st_size} {stat.st_mtime_ns}\n"
    except OSError:
        verified = False
    if verified:
        return {"verified": True, "bytes": stat.st_size, "missing": 0}
    size, why = model.get("bytes"), "no URL"
    for url in model["urls"] if not size else []:
        size, why = size_of(url)
        if size:
            break
    if not size and model["urls"]:
        problems.append(
            f"the model can't be fetched from {unsigned(model['urls'][-1])}: {why}. Remedy: "
            "llama_node_model_url or llama_node_model_mirrors with an address that answers here, "
            "or llama_node_model_file, to send it from the control machine"
        )
    partial = Path(f"{path}.partial")
    there = partial.stat().st_size if partial.is_file() else 0
    return {"verified": False, "bytes": size or 0, "missing": max(0, (size or 0) - there)}


def unsigned(url: str) -> str:
    """A URL without the parts that may be secret: a password or a signature."""
    return re.sub(r"[?#].*", "?...", re.sub(r"//[^/@]*@", "//...@", url), count=1)


def size_of(url: str) -> tuple[int | None, str]:
    """The size of a file by its server, or None and the reason.

    A URL signed for GET alone refuses HEAD; then the first byte is requested.
    """
    why = ""
    for method, headers in (("HEAD", {}), ("GET", {"Range": "bytes=0-0"})):
        try:
            request = urllib.request.Request(url, method=method, headers=headers)
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                whole = answer.headers.get("Content-Range", "").rpartition("/")[2]
                length = whole or answer.headers.get("Content-Length", "")
        except urllib.error.HTTPError as error:
            error.close()
            why = f"status {error.code}"
            if error.code not in REFUSES_HEAD:
                break
        except (OSError, ValueError) as error:
            return None, str(getattr(error, "reason", error))
        else:
            if length.isdecimal():
                return int(length), ""
            why = "its size is not given"
    return None, why


def disks(spec: dict[str, Any], model: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The disk space that the roles need, with the missing part of the model."""
    wanted = [one for one in spec.get("disks", []) if not Path(one["unless"]).exists()]
    if model:
        folder = str(Path(spec["model"]["path"]).parent)
        if model["missing"] and not spec["model"]["urls"]:
            wanted += sent_by_way_of(Path(folder), model["bytes"])
        wanted.append(
            {
                "path": folder,
                "bytes": model["missing"],
                "variable": "llama_node_models_folder",
                "what": "the model",
            }
        )
    return wanted


def disks_on_demand(spec: dict[str, Any], models: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The disk space that the missing parts of the models on demand need; a file counts once."""
    sent = {one["path"] for one in spec.get("models", []) if not one["urls"]}
    wanted = []
    for path, model in {one["path"]: one for one in models}.items():
        if model["missing"]:
            place = {"path": str(Path(path).parent), "bytes": model["missing"]}
            wanted.append(
                {**place, "variable": "llama_node_models_folder", "what": Path(path).name}
            )
    uploads = [one for one in models if one["missing"] and one["path"] in sent]
    if uploads:  # one after the other
        largest = max(uploads, key=lambda one: one["bytes"])
        wanted += sent_by_way_of(Path(largest["path"]).parent, largest["bytes"])
    return wanted


def sent_by_way_of(folder: Path, size: int) -> list[dict[str, Any]]:
    """Space in the login user's home, where Ansible puts a file first.

    Empty if the home is on the file system of the destination: then the file is only renamed.
    """
    user = os.environ.get("SUDO_USER") or "root"
    try:
        home = Path(pwd.getpwnam(user).pw_dir)
    except KeyError:
        return []
    if existing(home).stat().st_dev == existing(folder).stat().st_dev:
        return []
    variable = "ansible_remote_tmp"
    return [
        {"path": str(home), "bytes": size, "variable": variable, "what": "the model on its way"}
    ]


def existing(path: Path) -> Path:
    """The path, or its nearest existing parent."""
    while not path.exists():
        path = path.parent
    return path


def disk_problems(wanted: list[dict[str, Any]]) -> list[str]:
    """File systems without room for the files that the play will write."""
    places = {}
    for one in wanted:
        path = existing(Path(one["path"]))
        places.setdefault(path.stat().st_dev, [path, []])[1].append(one)
    problems = []
    for path, several in places.values():
        needed = sum(one["bytes"] for one in several)
        free = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize
        if free < needed:
            what = ", ".join(f"{one['what']} in {one['path']}" for one in several if one["bytes"])
            variables = " or ".join(
                dict.fromkeys(one["variable"] for one in several if one["bytes"])
            )
            problems.append(
                f"not enough disk space: {what} {'needs' if len(several) == 1 else 'need'} "
                f"{gib(needed)}, {gib(free)} are free on {path}. "
                f"Remedy: make room there, or set {variables} to a folder on a larger disk"
            )
    return problems


def topology(sources: list[tuple[str, str]]) -> dict[str, Any]:
    """The machine's topology, by the gateway's own modules; they need nothing installed."""
    for name, text in sources:
        module = types.ModuleType(name)
        module.__dict__["__path__"] = []
        sys.modules[name] = module
        exec(compile(text, name, "exec"), module.__dict__)
    module = sys.modules["gateway.local.topology"]
    return module.topology_as_dict(module.read_topology())


def numa_problems(spec: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """NUMA nodes that were requested and don't exist."""
    there = [node["number"] for node in found["numa_nodes"]]
    missing = [number for number in spec.get("numa_nodes", []) if number not in there]
    if not missing:
        return []
    found_here = ", ".join(map(str, there))
    return [
        (
            f"no NUMA node {', '.join(map(str, missing))} (llama_node_numa_nodes) with CPUs here. "
            f"Remedy: take it out; there {'is' if len(there) == 1 else 'are'} {found_here}"
        )
    ]


def memory_problems(spec: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Too little memory for the servers, in the machine or in a NUMA node they are bound to."""
    size, rule = found["model"]["bytes"], spec["memory"]
    wanted = spec.get("numa_nodes") or [node["number"] for node in found["topology"]["numa_nodes"]]
    servers = [one for one in found["topology"]["servers"] if one["numa"] in wanted]
    # The control machine has read the model's head, unless it has only a URL.
    each = rule.get("needed") or int(size * rule["factor"])
    why = rule["why"] if rule.get("needed") else f"{rule['factor']} x model"
    units = found["units"]
    ours = sum(unit["memory"] for unit in units.values())
    rooms = [("this machine", len(servers), found["topology"]["memory_available"] + ours)]
    for one in servers:
        if one["bind_memory"]:
            unit = units.get(f"llama-server-numa{one['numa']}.service", {"memory": 0})
            (node,) = (n for n in found["topology"]["numa_nodes"] if n["number"] == one["numa"])
            room = node["memory_available"] + unit["memory"]
            rooms.append((f"NUMA node {one['numa']}", 1, room))
    return [
        f"not enough memory: the model is {gib(size)}, so {count} "
        f"server{'s need' if count > 1 else ' needs'} {gib(each * count)} ({why} "
        f"each) and {gib(rule['reserve'])} must stay free, but {where} has {gib(room)}, swap "
        "not counted. Remedy: a smaller model or quantization (llama_node_model_url, "
        "llama_node_model_file), or fewer servers (llama_node_numa_nodes)"
        for where, count, room in rooms
        if room - each * count < rule["reserve"]
    ]


def memory_problems_on_demand(spec: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Too little memory for the largest of the models on demand, or for all that are preloaded."""
    rule, topology = spec["memory"], found["topology"]
    wanted = spec.get("numa_nodes") or [node["number"] for node in topology["numa_nodes"]]
    servers = sum(one["numa"] in wanted for one in topology["servers"])
    ours = sum(unit["memory"] for unit in found["units"].values())
    room = topology["memory_available"] + ours - rule["reserve"]
    whose = (
        f"this machine has {gib(max(room, 0))} beside {gib(rule['reserve'])} that must stay free"
    )
    given = re.fullmatch(r"([0-9.]+) *([KMGT])(i?)B", spec.get("models_memory", ""))
    if given:
        base = 1024 if given[3] else 1000
        said = float(given[1]) * base ** ("KMGT".index(given[2]) + 1)
        if said > room:
            return [
                f"not enough memory: llama_node_memory is {gib(said)}, but {whose}. Remedy: less"
            ]
        room, whose = said, f"llama_node_memory is {gib(said)}"
    # The gateway counts what a server may cache as memory of the model.
    cached = spec.get("cache_ram", 0) << 20
    needs = {
        one["name"]: int(seen["bytes"] * rule["factor"]) + cached
        for one, seen in zip(spec["models"], found["models"], strict=True)
    }
    largest = max(needs, key=needs.__getitem__)
    always = servers * sum(needs[name] for name in spec.get("preload", []))
    return [
        f"not enough memory: {what} {gib(size)} ({rule['factor']} x file, and "
        f"llama_node_cache_ram), but {whose}. Remedy: {remedy}"
        for what, size, remedy in (
            (f"{largest} needs", needs[largest], "take it out of llama_node_models"),
            (
                f"what {servers} server{'s have' if servers > 1 else ' has'} preloaded needs",
                always,
                "fewer of llama_node_preload, or fewer servers (llama_node_numa_nodes)",
            ),
        )
        if size > room
    ]


def gib(size: float) -> str:
    """A size for people."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / (1 << 20):.0f} MiB"


def run(*command: str) -> str:
    """The output of a program; empty if it can't be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))) + "\n")

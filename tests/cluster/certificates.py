"""Certificates of members, of a real authority, and the settings that name them."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import trustme

from gateway.config.settings import ClusterSettings, ClusterTls

CLUSTER = "c"


class Authority:
    """An authority whose certificates are files of this folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = trustme.CA()
        folder.mkdir(exist_ok=True)
        self.ca.cert_pem.write_to_path(str(folder / "ca.pem"))

    def files(self, *names: str, **more: Any) -> ClusterTls:
        """Return a certificate with these names; the files are called by the first one."""
        made = self.ca.issue_cert(*names, **more)
        cert, key = (self.folder / f"{names[0]}{end}" for end in (".pem", ".key"))
        made.private_key_pem.write_to_path(str(key))
        cert.write_bytes(b"".join(part.bytes() for part in made.cert_chain_pems))
        return ClusterTls(cert=cert, key=key, ca=self.folder / "ca.pem")

    def written(self, *names: str) -> dict[str, str]:
        """Return the same as it stands in a file of settings."""
        written: dict[str, str] = self.files(*names).model_dump(mode="json", exclude_none=True)
        return written

    def settings(self, member: str, **more: Any) -> ClusterSettings:
        """Return the settings of a member with a certificate of its own."""
        given = {"name": CLUSTER, "listen": "127.0.0.1:9", "tls": self.files(member)}
        return ClusterSettings(member=member, **{**given, **more})


@functools.cache
def authority() -> Authority:
    """One authority for all tests of this process, with a folder that goes at its end."""
    folder = tempfile.mkdtemp(prefix="llama-gateway-authority-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Authority(Path(folder))

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.deploy.llama_archives import EMBEDDED_SERVER, ROOT


def test_the_embedded_server_needs_no_other_module_of_the_gateway(tmp_path: Path) -> None:
    for path in EMBEDDED_SERVER:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import gateway.local.embedded"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, timeout=60)

"""Renews docs/images/first-minute.svg, the terminal in README.md, from a real run of the program.

    $ python -m tests.terminal_picture

What the picture shows was really run and answered: `llama-gateway up` with two llama.cpp servers
on the demo model, and the commands below. Ports 8000 and 8001 must be free. The only things that
are not shown as they came: the folder of the run stands as `~`, and settings keep the log to
warnings. Nothing in the picture is loaded from elsewhere.
"""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "first-minute.svg"
TITLE = "llama-gateway up, a request to it with curl, and llama-gateway nodes, in a terminal"
COLUMNS = 97
LIMIT = "120"  # seconds
UP = "llama-gateway up --servers 2"
ASK = """\
curl -sD - -o answer.json http://127.0.0.1:8000/v1/chat/completions \\
    -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 40}'"""
# Without rich's fonts, which a browser would fetch; with the title for those who can't see.
SVG = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL).replace(
    "<style>", f"<title>{TITLE}</title>\n    <style>", 1
)


def main() -> None:
    """Run everything and write the picture."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    with tempfile.TemporaryDirectory() as home:
        settings = Path(home, "gateway.yaml")
        settings.write_text("logging: {level: warning}\n")
        environment = {
            "HOME": home,
            "LANG": "C.UTF-8",
            "LLAMA_GATEWAY_CONFIG": str(settings),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "TERM": "xterm-256color",
        }

        def show(command: str, output: str) -> None:
            console.print(Text.assemble(("$ ", "green"), (command, "bold")))
            console.print(Text.from_ansi(output.replace(home, "~").strip()), end="\n\n")

        served = subprocess.Popen(
            ["timeout", LIMIT, *UP.split()],
            stderr=subprocess.PIPE, env=environment, cwd=home, text=True,
        )  # fmt: skip
        try:
            show(UP, until_it_serves(served))
            for command in (ASK, "llama-gateway nodes"):
                # `script` gives the command a terminal.
                typed = f"stty cols {COLUMNS}; {command}"
                ran = subprocess.run(
                    ["timeout", LIMIT, "script", "-qec", typed, "/dev/null"],
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment, cwd=home,
                    check=True,
                )  # fmt: skip
                show(command, re.sub(r"\r+\n", "\n", ran.stdout.decode()))
        finally:
            served.send_signal(signal.SIGINT)
            served.wait()
    console.save_svg(str(PICTURE), title="", code_format=SVG, unique_id="terminal")
    sys.stdout.write(f"{PICTURE.name}: {PICTURE.stat().st_size:,} bytes\n")


def until_it_serves(served: subprocess.Popen[str]) -> str:
    """Return what `up` says until it invites to try, with the line that it suggests."""
    assert served.stderr is not None
    lines: list[str] = []
    for line in served.stderr:
        lines.append(line)
        if line.startswith("  curl"):
            return "".join(lines)
    raise SystemExit("\n".join(["llama-gateway up did not come to serve:", *lines]))


if __name__ == "__main__":
    main()

"""Renews docs/images/first-minute.svg, the terminal in README.md, from a real run of the program.

    $ python -m tests.terminal_picture

What the picture shows was really run and answered: `llama-gateway up` with two llama.cpp servers
on the demo model, and the commands below. Ports 8000 and 8001 must be free. The only things that
are not shown as they came: the folder of the run stands as `~`, and settings keep the log to
warnings. Nothing in the picture is loaded from elsewhere.
"""

from __future__ import annotations

import os
import pty
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ
from xml.sax.saxutils import escape

from rich.console import Console
from rich.style import Style
from rich.text import Text

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "first-minute.svg"
TITLE = "llama-gateway up, a request to it with curl, and llama-gateway nodes, in a terminal"
COLUMNS = 97
COMMAND_LIMIT = 120  # seconds
ASK = """\
curl -sD - -o answer.json http://127.0.0.1:8000/v1/chat/completions \\
    -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 40}'"""
COMMANDS = (ASK, "llama-gateway nodes")
CHARACTER, LINE, MARGIN, TOP = 8.43, 20, 20, 48  # pixels, at 14 pixels a letter
GREEN = 2
COLOURS = {1: "#ff7b72", GREEN: "#56d382", 3: "#e3b341", 6: "#56d4dd"}  # by number of the terminal
SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">
<title>{title}</title>
<style>
text {{ font: 14px ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #c9d1d9 }}
.bold {{ font-weight: 700; fill: #f0f6fc }}
</style>
<rect x="0.5" y="0.5" width="{inner_width}" height="{inner_height}" rx="9" fill="#0d1117" stroke="#3d444d"/>
<circle cx="22" cy="21" r="6" fill="#ff5f57"/>
<circle cx="42" cy="21" r="6" fill="#febc2e"/>
<circle cx="62" cy="21" r="6" fill="#28c840"/>
{lines}
</svg>
"""  # noqa: E501 - attributes of one element


def main() -> None:
    """Run everything and write the picture."""
    lines = prompt("llama-gateway up --servers 2")
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
        served = subprocess.Popen(
            ["llama-gateway", "up", "--servers", "2"],
            stderr=subprocess.PIPE,
            env=environment,
            cwd=home,
            text=True,
        )
        try:
            lines += [Text(line.replace(home, "~")) for line in until_it_serves(served)]
            for command in COMMANDS:
                output = run(command, environment).replace(home, "~").strip("\n")
                lines += [Text(), *prompt(command)]
                lines += [Text.from_ansi(line) for line in output.split("\n")]
        finally:
            served.send_signal(signal.SIGINT)
            served.wait(COMMAND_LIMIT)
    PICTURE.write_text(picture(lines))
    sys.stdout.write(f"{PICTURE.name}: {PICTURE.stat().st_size:,} bytes\n")


def until_it_serves(served: subprocess.Popen[str]) -> list[str]:
    """Return what `up` says until it invites to try, with the line that it suggests."""
    assert served.stderr is not None
    lines: list[str] = []
    end = time.monotonic() + COMMAND_LIMIT
    for line in served.stderr:
        lines.append(line.rstrip("\n"))
        if line.startswith("  curl"):
            return lines
        if time.monotonic() > end:
            break
    raise SystemExit("\n".join(["llama-gateway up did not come to serve:", *lines]))


def run(command: str, environment: dict[str, str]) -> str:
    """Run a command in a terminal of its own and return what it wrote there."""
    ours, theirs = pty.openpty()
    ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    process = subprocess.Popen(
        ["timeout", str(COMMAND_LIMIT), "bash", "-c", command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
        cwd=environment["HOME"],
    )
    os.close(theirs)
    written = b""
    try:
        while piece := os.read(ours, 65536):
            written += piece
    except OSError:
        pass  # the last process that had the terminal has ended
    os.close(ours)
    if process.wait():
        raise SystemExit(f"{command}\n{written.decode()}")
    return re.sub(r"\r+\n", "\n", written.decode())


def prompt(command: str) -> list[Text]:
    """Return a command as it was typed."""
    first, *more = command.split("\n")
    typed = Text.assemble(("$ ", "green"), (first, "bold"))
    return [typed, *(Text.assemble((line, "bold")) for line in more)]


def picture(lines: list[Text]) -> str:
    """Return the lines as an SVG; a line that is too long goes on in the next, as in a terminal."""
    rows = [row for line in lines for row in folded(line)]
    width, height = round(COLUMNS * CHARACTER) + 2 * MARGIN, TOP + len(rows) * LINE + MARGIN - 8
    return SVG.format(
        width=width,
        height=height,
        inner_width=width - 1,
        inner_height=height - 1,
        title=escape(TITLE),
        lines="\n".join(
            piece
            for number, row in enumerate(rows)
            for piece in pieces(row, TOP + LINE * number + 14)
        ),
    )


def folded(line: Text) -> Iterator[Text]:
    """Yield the line in pieces of the terminal's width."""
    line.rstrip()
    yield from line.divide(range(COLUMNS, len(line), COLUMNS))


def pieces(row: Text, y: int) -> Iterator[str]:
    """Yield each run of words of one style, at its column and of its width in any font."""
    column = 0
    for segment in row.render(Console(color_system="standard", width=COLUMNS)):
        for words in re.finditer(r"\S+( \S+)*", segment.text):
            x = MARGIN + (column + words.start()) * CHARACTER
            yield (
                f'<text x="{x:.1f}" y="{y}" textLength="{len(words[0]) * CHARACTER:.1f}"'
                f"{look(segment.style)}>{escape(words[0])}</text>"
            )
        column += len(segment.text)


def look(style: Style | None) -> str:
    """Return the attributes of a style."""
    colour = COLOURS.get(style.color.number or 0, "") if style and style.color else ""
    bold = ' class="bold"' if style and style.bold else ""
    return bold + (f' style="fill: {colour}"' if colour else "")


if __name__ == "__main__":
    main()

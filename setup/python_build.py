"""Finds out how this Python was built: an unoptimised build takes 15-20 % more CPU.

    python setup/python_build.py     warns of an unoptimised build; else prints nothing

Measured in turns with nginx: a plain request costs 5.07 x nginx on Debian's 3.11.2 and 5.96 x on a
3.11.7 built without optimisation (docs/performance.md).
"""

from __future__ import annotations

import platform
import shlex
import sys
import sysconfig
from collections.abc import Mapping
from typing import Any

PROFILE_FLAGS = ("-fprofile-use", "-fprofile-instr-use")
SHOWN_SWITCHES = (
    "--enable-",
    "--with-lto",
    "--with-pydebug",
    "--disable-gil",
    "--with-tail-call-interp",
)
HIDDEN_SWITCHES = ("--enable-shared", "--enable-ipv6", "--enable-loadable-sqlite-extensions")


def optimised(variables: Mapping[str, Any] | None = None) -> bool | None:
    """Whether the build was guided by a profile; None if its records don't show it.

    `variables` are those of `sysconfig`. The signs:

    - `--enable-optimizations` among the arguments of configure (python.org's images, Fedora, conda,
      uv's builds), or a flag that uses a profile among those of the compiler;
    - configure records one flag to make a profile and one to use it. Debian, Ubuntu and deadsnakes
      build with a profile without that argument, and their records lack the second flag;
    - with both flags on record and neither used, there was no profile (pyenv without
      PYTHON_CONFIGURE_OPTS).
    """
    known = sysconfig.get_config_vars() if variables is None else variables
    arguments = known.get("CONFIG_ARGS")
    if not isinstance(arguments, str):
        return None
    used = [str(known.get(name) or "") for name in ("PY_CORE_CFLAGS", "PY_CFLAGS")]
    if "--enable-optimizations" in shlex.split(arguments):
        return True
    if any(flag in flags for flag in PROFILE_FLAGS for flags in used):
        return True
    if not known.get("PGO_PROF_GEN_FLAG"):
        return None
    return not known.get("PGO_PROF_USE_FLAG")


def described(variables: Mapping[str, Any] | None = None) -> str:
    """The build in one line, without paths: optimised or not, compiler, switches and flags."""
    known = sysconfig.get_config_vars() if variables is None else variables
    verdict = {True: "optimised", False: "NOT optimised", None: "optimisation unknown"}
    switches = [
        word
        for word in shlex.split(str(known.get("CONFIG_ARGS") or ""))
        if word.startswith(SHOWN_SWITCHES) and word not in HIDDEN_SWITCHES
    ]
    flags = dict.fromkeys(
        word for word in str(known.get("PY_CFLAGS") or "").split() if word[:2] in {"-O", "-f", "-m"}
    )
    words = [verdict[optimised(known)], platform.python_compiler(), *switches, *flags]
    return f"{words[0]}, {words[1]}" + "".join(f" {word}" for word in words[2:])


def warning() -> str:
    """A warning that this Python is slow, with the cost and the remedy; empty if it is not."""
    if optimised() is not False:
        return ""
    return (
        f"Python {platform.python_version()} ({sys.base_prefix}) was built without optimisation: "
        "the gateway takes 15-20 % more CPU. Remedy: the system's Python (apt-get install python3 "
        "python3-venv; make clean), or one built with --enable-optimizations"
    )


if __name__ == "__main__":
    if message := warning():
        sys.stderr.write(f"{message}\n")

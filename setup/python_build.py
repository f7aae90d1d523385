"""How the Python that runs this was built: an unoptimised one takes 15-20 % more CPU.

    python setup/python_build.py     says so where it is one, else nothing

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

PROFILED = ("-fprofile-use", "-fprofile-instr-use")
TOLD = ("--enable-", "--with-lto", "--with-pydebug", "--disable-gil", "--with-tail-call-interp")
UNTOLD = ("--enable-shared", "--enable-ipv6", "--enable-loadable-sqlite-extensions")


def optimised(variables: Mapping[str, Any] | None = None) -> bool | None:
    """Whether the build was guided by a profile; None where its records don't tell.

    `variables` are those of `sysconfig`. What tells:

    - `--enable-optimizations` among the arguments of configure (python.org's images, Fedora, conda,
      uv's builds), or a flag that uses a profile among those of the compiler;
    - configure records one flag to make a profile and one to use it. Debian, Ubuntu and deadsnakes
      build with a profile without that argument, and their record has lost the second;
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
    if any(flag in flags for flag in PROFILED for flags in used):
        return True
    if not known.get("PGO_PROF_GEN_FLAG"):
        return None
    return not known.get("PGO_PROF_USE_FLAG")


def described(variables: Mapping[str, Any] | None = None) -> str:
    """The build in one line, without a path: optimised or not, compiler, switches and flags."""
    known = sysconfig.get_config_vars() if variables is None else variables
    verdict = {True: "optimised", False: "NOT optimised", None: "optimisation unknown"}
    switches = [
        word
        for word in shlex.split(str(known.get("CONFIG_ARGS") or ""))
        if word.startswith(TOLD) and word not in UNTOLD
    ]
    flags = dict.fromkeys(
        word for word in str(known.get("PY_CFLAGS") or "").split() if word[:2] in {"-O", "-f", "-m"}
    )
    words = [verdict[optimised(known)], platform.python_compiler(), *switches, *flags]
    return f"{words[0]}, {words[1]}" + "".join(f" {word}" for word in words[2:])


def warning() -> str:
    """What to tell of this Python: that it is slow, what that costs, and the remedy; or nothing."""
    if optimised() is not False:
        return ""
    return (
        f"Python {platform.python_version()} ({sys.base_prefix}) was built without optimisation: "
        "the gateway takes 15-20 % more CPU. Remedy: the system's Python (apt-get install python3 "
        "python3-venv; make clean), or one built with --enable-optimizations"
    )


if __name__ == "__main__":
    if told := warning():
        sys.stderr.write(f"{told}\n")

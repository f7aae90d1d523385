from __future__ import annotations

import pytest

from setup import python_build
from setup.python_build import optimised, warning
from tests.each_case import each_case

DEBIAN = {  # 3.13.5 of Debian 13
    "CONFIG_ARGS": "'--enable-shared' '--prefix=/usr' '--enable-ipv6' 'CC=x86_64-linux-gnu-gcc'",
    "PY_CFLAGS": "-fno-strict-overflow -Wsign-compare -DNDEBUG -g -O2 -Wall",
    "PY_CORE_CFLAGS": "-g -O2 -Wall -fstack-protector -I../Include/internal",
    "PGO_PROF_GEN_FLAG": "-fprofile-generate",
    "PGO_PROF_USE_FLAG": "",
}
PLAIN = DEBIAN | {  # ./configure --prefix=… && make
    "CONFIG_ARGS": "'--prefix=/opt/it' 'LDFLAGS=-L/opt/it/lib -Wl,-rpath,/opt/it/lib'",
    "PGO_PROF_USE_FLAG": "-fprofile-use -fprofile-correction",
}
ASKED_FOR = PLAIN | {"CONFIG_ARGS": "'--enable-optimizations' '--with-lto' '--prefix=/usr/local'"}
BY_HAND = PLAIN | {"PY_CORE_CFLAGS": "-O3 -fprofile-use -fprofile-correction"}


@each_case(
    ("variables", "verdict"),
    [
        *((DEBIAN, True), (PLAIN, False), (ASKED_FOR, True), (BY_HAND, True)),
        *(({}, None), ({"CONFIG_ARGS": "'--prefix=/usr'"}, None)),
    ],
)
def test_only_a_build_that_is_known_to_be_slow_causes_a_warning(
    variables: dict[str, str], verdict: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert optimised(variables) is verdict
    monkeypatch.setattr(python_build, "optimised", lambda: verdict)
    assert ("15-20 %" in warning()) is ("apt-get install python3" in warning())
    assert ("15-20 %" in warning()) is (verdict is False)

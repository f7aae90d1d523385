from __future__ import annotations

import pytest

from gateway.system import connection_limits


@pytest.mark.parametrize(
    ("files", "public", "admin"),
    [(1 << 20, 10_000, 10_000), (20_000, 10_000, 5_000), (1024, 512, 256), (1, 1, 1)],
)
def test_connection_limits_leave_open_files_for_nodes(files: int, public: int, admin: int) -> None:
    assert connection_limits(files, 10_000, 10_000) == (public, admin)
    assert files < 4 or public + admin <= files * 3 // 4

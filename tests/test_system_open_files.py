from __future__ import annotations

import pytest

from gateway.system import connection_limits


@pytest.mark.parametrize(
    ("files", "public", "admin"),
    [(1 << 20, 12_000, 12_000), (20_000, 12_000, 2_500), (1024, 640, 128), (1, 1, 1)],
)
def test_connection_limits_leave_open_files_for_nodes(files: int, public: int, admin: int) -> None:
    assert connection_limits(files, 12_000, 12_000) == (public, admin)
    assert files < 8 or public + admin <= files * 3 // 4

from __future__ import annotations

from pathlib import Path

import pytest
from transport_kit import Fleet, GrpcFleet, InprocFleet


@pytest.fixture(params=["inproc", "grpc"])
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Fleet:
    """Endpoints of each kind: both must keep the same promises."""
    return GrpcFleet(tmp_path / "authority") if request.param == "grpc" else InprocFleet()

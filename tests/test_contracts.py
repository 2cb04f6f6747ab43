"""Every member against every law that applies to it."""

from __future__ import annotations

from typing import Any

import pytest

from contracts import CASES, Law


def named(law: Law) -> str:
    return f"{law.__module__.rpartition('.')[2]}.{law.__name__}"


@pytest.mark.parametrize(("law", "member"), [pytest.param(law, m, id=f"{named(law)}-{n}") for n, law, m in CASES])
def test_law(law: Law, member: Any) -> None:
    law(member)

"""Every member against every law that applies to it, on numbers that hypothesis draws."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from contracts import CASES, Law
from strategies import drawn, seeds


def named(law: Law) -> str:
    return f"{law.__module__.rpartition('.')[2]}.{law.__name__}"


@pytest.mark.parametrize(("law", "member"), [pytest.param(law, m, id=f"{named(law)}-{n}") for n, law, m in CASES])
@settings(max_examples=4)
@given(draw=seeds)
def test_law(law: Law, member: Any, draw: int) -> None:
    token = drawn.set(draw)
    try:
        law(member)
    finally:
        drawn.reset(token)

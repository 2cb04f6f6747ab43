"""The runtime type checker of the test run: beartype, less what it cannot check at run time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from beartype import beartype
from beartype.roar import BeartypeDecorHintPep673Exception, BeartypeDecorHintPep3119Exception


def shapes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Checks every annotation but `Self` (which needs a decorated class) and plain protocols (which have no check)."""
    try:
        return beartype(function)
    except BeartypeDecorHintPep673Exception:
        function.__annotations__ = {n: hint for n, hint in function.__annotations__.items() if "Self" not in str(hint)}
        return beartype(function)
    except BeartypeDecorHintPep3119Exception:
        return function

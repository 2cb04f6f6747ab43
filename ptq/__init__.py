"""ptq: post-training compression of torch models as one small algebra.

`ptq._api` lists the public names. They are loaded on first use, so that `import ptq` and `ptq --help` cost nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ptq._api import *  # noqa: F403  # what a type checker sees is what `__getattr__` gives


def __getattr__(name: str) -> Any:
    try:
        return getattr(import_module("ptq._api"), name)
    except AttributeError:
        raise AttributeError(f"module 'ptq' has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return [name for name in vars(import_module("ptq._api")) if not name.startswith("_") and name != "annotations"]

"""ptq: post-training compression of torch models as one small algebra.

`ptq._api` lists the public names. They are loaded on first use, so that `import ptq` and `ptq --help` cost nothing.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ptq._api import *  # noqa: F403  # what a type checker sees is what `__getattr__` gives


def __getattr__(name: str) -> object:
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module 'ptq' has no attribute {name!r}")
    api = vars(_import_module("ptq._api"))
    public = [known for known in api if not known.startswith("_") and known != "annotations"]
    if name == "__all__":
        return public
    if name not in public:
        raise AttributeError(f"module 'ptq' has no attribute {name!r}")
    return api[name]


def __dir__() -> list[str]:
    return list(__getattr__("__all__"))  # type: ignore[call-overload]  # it is a list

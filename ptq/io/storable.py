"""What a format can hold, told by what a leaf is and not by its values, so that it is known before there are any."""

from __future__ import annotations

from torch import nn

from ptq.base import Params
from ptq.errors import BadInput
from ptq.io import bitmask
from ptq.io.compressed_tensors import zeroed
from ptq.io.layouts import LAYOUTS, arguments, default_format, described
from ptq.models.model import Model
from ptq.models.naming import joint, names_in_files
from ptq.numerics.indexed import Indexed, simplest
from ptq.numerics.leaves import Leaf, Quantized, Sparse, Transposed, compressed

FORMATS = ("dense", "frozen", *LAYOUTS, *bitmask.FORMATS)


def check_format(form: str) -> None:
    """Raises `BadInput` where no weight is written as that."""
    if form not in ("auto", *FORMATS):
        raise BadInput(f"format {form!r} is not written; expected auto, {', '.join(FORMATS)}")


def refuse_unstorable(model: Model, params: Params, form: str) -> None:
    """Raises `BadInput` where a parameter would lose what it was given, in a format that was asked for by name.

    Args:
        model: what they are parameters of.
        params: what they are, or will be, in memory or on the meta device.
        form: the format, or "auto".
    """
    shapes = {name: leaf.shape for name, leaf in model.params.items()}
    files, groups = names_in_files(model.module, shapes), joint(model.module, shapes)
    sizes = {name: len(group) for group in groups for name in group}
    for name, leaf in params.items():
        piece = len(files[name]) > sizes[name]
        refuse_loss(name, leaf, form, piece or plain_linear(model.module.get_submodule(name.rpartition(".")[0])))


def refuse_loss(name: str, leaf: Leaf, form: str, loadable: bool) -> None:
    """The same of one parameter.

    Args:
        name: of the parameter.
        leaf: what it is, not lazy.
        form: the format, or "auto".
        loadable: whether loaders read it compressed: it is the weight of a plain linear, alone or cut out of a stack.
    """
    reason = _lost(leaf, form) if loadable and compressed(leaf) else ""
    if reason:
        raise BadInput(
            f"{name}: cannot be stored as {form}: {reason}; "
            "choose another format: auto stores each weight as it can be, dense all"
        )


def _lost(leaf: Leaf, form: str) -> str:
    if form in bitmask.FORMATS:
        return bitmask.unfit(leaf, form)
    inner = quantized(leaf) if form not in ("auto", "dense") else None
    if not isinstance(inner, Quantized):
        return ""
    held = arguments(inner, form if form in LAYOUTS else default_format(inner))
    return "" if held else f"it is {described(inner)}"


def plain_linear(module: nn.Module | None) -> bool:
    """Whether a loader may put a forward of its own in the place of the module's."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def quantized(leaf: Leaf) -> Quantized | Indexed | None:
    """The quantized values of a leaf that has them: those of a sparse leaf with the code of 0 where it is pruned."""
    if isinstance(leaf, Transposed):  # quantized, though no loader reads it
        return quantized(leaf.leaf)
    if isinstance(leaf, Sparse):
        return zeroed(leaf.values, leaf.mask) if isinstance(leaf.values, Quantized) else quantized(leaf.values)
    leaf = simplest(leaf) if isinstance(leaf, Indexed) else leaf
    return leaf if isinstance(leaf, Quantized | Indexed) else None


def unloadable(leaf: Quantized, form: str, loadable: bool) -> str:
    """Why no loader reads a leaf's codes and scales in a format; empty: some do."""
    if not loadable and len(leaf.shape) > 2:
        return "the model's class keeps these experts in one tensor, and loaders read compressed ones one by one only"
    if not loadable:
        return "loaders read compressed weights of plain linears only"
    args = arguments(leaf, form)
    return "" if args else f"{form} cannot hold {described(leaf)}"

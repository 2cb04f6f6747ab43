"""The algebra: what a transform is, and the few ways to combine transforms."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from ptq._tree import node, static
from ptq.errors import BadInput, PtqError
from ptq.numerics.leaves import Leaf, Transposed
from ptq.numerics.stats import KINDS, Statistic

Params = dict[str, Leaf]
"""Flat, dotted names as the module has them; canonical ones only (aliases of tied weights are the model's)."""
Sites = dict[str, tuple[str, ...]]
"""A site, named after its first reader -> the weights that read this very tensor."""
Stats = dict[str, dict[str, Any]]
"""Site -> kind -> `Statistic`, each stored once; and weight -> {"outcome": `Outcome`} for what a solve had to do."""


class State(NamedTuple):
    """The pytree that transforms take and return."""

    params: Params
    maps: dict[str, tuple[Any, ...]] = {}
    """Activation maps: a weight (this read of its input only), "<weight>@out", "<attention>@q|k|p|v" -> maps."""

    def with_params(self, params: Params) -> State:
        """Other parameters; a weight that is no longer what it was loses its maps, whose scales were chosen for it."""
        other = {name for name, leaf in params.items() if leaf is not self.params.get(name)}
        return State(params, {key: maps for key, maps in self.maps.items() if key.partition("@")[0] not in other})


class Link(NamedTuple):
    """A norm and the weights that read its output: what a change of variables acts on.

    The norm computes `(weight + offset) * normalized(x) + bias`; the offset is 0, or 1 for norms that store `w - 1`.
    """

    source: str
    sinks: tuple[str, ...]
    offset: float = 0.0


@node
class Outcome:
    """What a solve did that was not asked for: a value, kept in the statistics under the weight's name."""

    damping: Tensor
    """`[*e]`: relative damping that was used in the end"""
    failures: Tensor
    """`[*e]`: factorizations that failed before"""
    note: str = static(default="")

    def after(self, earlier: Outcome | None) -> Outcome:
        """This one and what another solve of the same weight had to do before: the worst of both."""
        if earlier is None:
            return self
        notes = dict.fromkeys(filter(None, (earlier.note, self.note)))
        damping = torch.maximum(earlier.damping, self.damping)
        return Outcome(damping, earlier.failures + self.failures, "; ".join(notes))


class Clause(NamedTuple):
    """One restriction of a transform to weights: those a pattern reaches, less those that others reach."""

    pattern: str
    ignore: tuple[str, ...] = ()
    earlier: tuple[str, ...] = ()
    """Patterns of a partition that come first and win."""


class Init(Protocol):
    """The declaring half of a transform."""

    def __call__(self, state: State, sites: Sites, **extra: Any) -> Stats:
        """Zeros of every statistic that `apply` must see: a declaration. Empty: no data is needed.

        Only shapes of `state.params` may be read. Raises `BadInput` for weights that the transform cannot take.
        """
        ...


class Apply(Protocol):
    """The working half of a transform."""

    def __call__(self, state: State, stats: Stats, sites: Sites, **extra: Any) -> tuple[State, Stats]:
        """A new state, and the statistics as what follows in a chain sees them. Changes no input."""
        ...


class Transform(NamedTuple):
    """A pure function on parameters, with a declaration of the statistics it wants to see."""

    kind: Literal["reparam", "solve"]
    """reparam: keeps the model's function, and is checked; solve: lossy"""
    scope: Literal["site", "block", "model"]
    """what `apply` must see at once"""
    init: Init
    apply: Apply
    needs: frozenset[str] = frozenset()
    """names of the extras it is given: links, key, forward"""
    select: tuple[Clause, ...] = ()
    """restrictions, all of which hold; empty: the default targets (matrices of linears inside the blocks)"""
    name: str = "custom"
    """for reports: the factory and what it was given"""


Stage = tuple[Transform, ...]
identity: Stage = ()


def chain(*members: Transform | Stage) -> Stage:
    """One stage out of several members: they share a calibration and are applied in written order.

    A monoid: `chain(a, chain(b, c)) == chain(chain(a, b), c)` and `chain(a, identity) == chain(a)`.

    >>> chain(identity, identity)
    ()
    """
    return tuple(t for m in members for t in ((m,) if isinstance(m, Transform) else m))


def targets(pattern: str, members: Transform | Stage, ignore: Sequence[str] = ()) -> Stage:
    """The same stage on fewer weights: those that `pattern` reaches, by the rules of `ptq.targeting`.

    Args:
        pattern: a weight, a module, an ancestor or a class name, exactly; or `re:` and a regular expression.
        members: what to restrict. A stage restricted twice obeys both.
        ignore: patterns of weights to leave out; one that matches nothing only warns.

    >>> from ptq.transforms.rtn import rtn
    >>> from ptq.numerics.schemes import scheme
    >>> targets("re:.*down_proj", rtn(scheme("W8A16")))[0].select
    (Clause(pattern='re:.*down_proj', ignore=(), earlier=()),)
    """
    return _restricted(members, Clause(pattern, tuple(ignore)))


def partition(rules: Mapping[str, Transform | Stage]) -> Stage:
    """Different stages for different weights; where several patterns reach a weight the first one wins."""
    patterns = tuple(rules)
    return chain(*(_restricted(m, Clause(p, (), patterns[:i])) for i, (p, m) in enumerate(rules.items())))


def _restricted(members: Transform | Stage, clause: Clause) -> Stage:
    return tuple(t._replace(select=(*t.select, clause)) for t in chain(members))


def leafwise(
    kinds: Sequence[str],
    solve: Callable[..., Leaf | tuple[Leaf, Outcome]],
    *,
    shared: Callable[..., dict[str, Any]] | None = None,
    together: Callable[[Sequence[Leaf]], Sequence[dict[str, Any]]] | None = None,
    check: Callable[[Leaf], None] | None = None,
    name: str = "custom",
) -> Transform:
    """A solve that treats each weight by itself.

    Args:
        kinds: names of the statistics of a weight's input that `solve` is given, such as "gram".
        solve: `solve(leaf, **{kind: statistic}) -> leaf`, the leaf as `[*e, out, in]`; or (leaf, `Outcome`).
        shared: `shared(**{kind: statistic}) -> keyword arguments`, computed once for all weights that read the same
            tensor, and then given to `solve` instead of the statistics.
        together: `together(leaves) -> keyword arguments for each`, of all weights that read the same tensor, for what
            they must agree on.
        check: raises `BadInput` for a leaf `[*e, out, in]` that cannot be taken; may read its type and shape only.
        name: what reports call it.

    >>> import torch
    >>> sign = leafwise((), lambda w: w.sign() * w.abs().mean(-1, keepdim=True))
    >>> state, _ = sign.apply(State({"a.weight": torch.tensor([[1.0, -3.0]])}), {}, {"a.weight": ("a.weight",)})
    >>> state.params["a.weight"]
    tensor([[ 2., -2.]])
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise BadInput(f"{name}: unknown statistic {unknown[0]!r}; known: {', '.join(KINDS)}")

    def init(state: State, sites: Sites, **extra: Any) -> Stats:
        if check:
            _check_all(check, {w: oriented(state.params[w]) for weights in sites.values() for w in weights})
        return {site: zeros(kinds, state.params[weights[0]]) for site, weights in sites.items()} if kinds else {}

    def apply(state: State, stats: Stats, sites: Sites, **extra: Any) -> tuple[State, Stats]:
        params, seen = dict(state.params), dict(stats)
        for site, weights in sites.items():
            given = {kind: stats[site][kind] for kind in kinds}
            with _naming(site):
                given = shared(**given) if shared else given
                agreed = together([oriented(params[w]) for w in weights]) if together else [{}] * len(weights)
            for weight, own in zip(weights, agreed, strict=True):
                with _naming(weight):
                    solved = solve(oriented(params[weight]), **given, **own)
                leaf, outcome = solved if isinstance(solved, tuple) else (solved, None)
                _check_solved(name, weight, oriented(params[weight]), leaf)
                params[weight] = Transposed(leaf) if isinstance(params[weight], Transposed) else leaf
                if outcome is not None:
                    known = seen.get(weight, {})
                    seen[weight] = {**known, "outcome": outcome.after(known.get("outcome"))}
        return state._replace(params=params), seen

    return Transform("solve", "site", init, apply, name=name)


def _check_all(check: Callable[[Leaf], None], leaves: Mapping[str, Leaf]) -> None:
    """Names every weight that cannot be taken at once, those with the same reason together."""
    refused: dict[str, list[str]] = {}
    for weight, leaf in leaves.items():
        try:
            check(leaf)
        except BadInput as error:
            refused.setdefault(str(error), []).append(weight)
    if refused:
        raise BadInput("; ".join(f"{_listed(weights)}: {reason}" for reason, weights in refused.items()))


def _listed(names: Sequence[str], most: int = 4) -> str:
    """Some of the names, and how many more."""
    more = [f"and {len(names) - most} more"] if len(names) > most else []
    return " ".join((", ".join(names[:most]), *more))


def _check_solved(name: str, weight: str, before: Leaf, after: Leaf) -> None:
    """A solve gives a leaf that can stand where the weight stood."""
    got = tuple(getattr(after, part, None) for part in ("shape", "dtype"))
    expected = before.shape, before.dtype
    if got != expected:
        raise BadInput(
            f"{weight}: {name} returned a {type(after).__name__} with {got}, expected a leaf with {expected}"
        )


@contextmanager
def _naming(weight: str) -> Generator[None, None, None]:
    """Says where it happened: numerics know no names."""
    try:
        yield
    except PtqError as error:
        raise type(error)(f"{weight}: {error}") from error


def oriented(leaf: Leaf) -> Leaf:
    """The leaf as `[*e, out, in]`."""
    return leaf.leaf if isinstance(leaf, Transposed) else leaf


def zeros(kinds: Sequence[str], leaf: Leaf) -> dict[str, Statistic]:
    """Neutral statistics for the input of a weight, on its device: on the CPU where it has no values."""
    *experts, _, features = oriented(leaf).shape
    device = "cpu" if leaf.device.type == "meta" else leaf.device
    return {kind: KINDS[kind].zero(features, experts=tuple(experts), device=device) for kind in kinds}

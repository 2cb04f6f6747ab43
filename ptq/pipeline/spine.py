"""All micro-batches through the model's own forward, in step.

Each micro-batch runs the whole stock forward, on a skeleton of its own, in a thread of its own, and parks at stops: at
the entry of a block and at weights that are not final yet. A baton of semaphores keeps exactly one thread running.
When all live threads have parked, the smallest stop in parameter order is complete: its inputs are all there, its
weights can be solved, and the threads that waited for it go on with the final values. So every linear runs once per
token and every later one sees compressed inputs, whatever the model does between its blocks.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from ptq.errors import Limited
from ptq.models.call import functional, named
from ptq.models.interpret import Interpreter, Use
from ptq.pipeline.offload import Live, Offload, Parked

STACK = 1 << 22
"""bytes of a micro-batch's thread, as few as kernels do with: all of them count where private memory is limited"""


class Batch(NamedTuple):
    """A micro-batch: what the model is called with, all samples of one length."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Stop(NamedTuple):
    """Where threads wait. Ordered by the position of a parameter in the model, a block's entry before its weights."""

    order: int
    rank: int
    """0 at the entry of a block, 1 at a site"""
    name: str
    """the site, or the path of the block's module"""


class Arrived(Mapping[int, Any]):
    """Micro-batch -> what it brought to a stop: an input `[..., in]`, or (args, kwargs) at an entry.

    Looking one up brings its bytes back from where they were put, and sends those of the one before away again.
    """

    def __init__(self) -> None:
        self._brought: dict[int, Any] = {}
        self._parked: dict[int, Parked] = {}
        self._shown: Parked | None = None

    def add(self, i: int, brought: Any, parked: Parked | None) -> None:
        self._brought[i] = brought
        if parked is not None:
            self._parked[i] = parked

    def clear(self) -> None:
        """Lets go of all of it."""
        self._brought.clear()
        self._parked.clear()
        self._shown = None

    def shapes(self) -> Iterable[Any]:
        """The same without their bytes, if these are away."""
        return self._brought.values()

    def __getitem__(self, i: int) -> Any:
        parked = self._parked.get(i)
        if self._shown is not None and self._shown is not parked:
            self._shown.empty()
        if parked is not None:
            parked.fill()
        self._shown = parked
        return self._brought[i]

    def __iter__(self) -> Iterator[int]:
        return iter(self._brought)

    def __len__(self) -> int:
        return len(self._brought)


class Abort(BaseException):
    """Ends a parked thread; a `BaseException`, so that model code cannot swallow it."""


class Spine:
    """The threads, and what they wait for. A context manager: leaving it ends every thread.

    Args:
        module: the skeleton; each thread gets a copy.
        handles: stand-ins for the parameters.
        aliases: the other names of tied parameters.
        batches: the micro-batches.
        read: serves parameter values; called in whichever thread runs.
        sites: weight -> stop at which it is solved; weights without one are served at once.
        entries: path of a block's module -> stop at its entry.
        lossy: names that an unknown operation may not read.
        offload: where micro-batches put what they hold while they wait; None: it stays where it is.
    """

    def __init__(
        self,
        module: nn.Module,
        handles: Mapping[str, Tensor],
        aliases: Mapping[str, str],
        batches: Sequence[Batch],
        read: Callable[[Use], Tensor],
        sites: Mapping[str, Stop],
        entries: Mapping[str, Stop],
        lossy: Container[str] = frozenset(),
        offload: Offload | None = None,
    ) -> None:
        self.waiting: dict[Stop, Arrived] = {}
        self.rows: dict[str, int] = {}
        """weight -> rows that met it, over all micro-batches"""
        self._module, self._batches, self._read = module, batches, read
        self._handles, self._names = handles, named(handles, aliases)
        self._sites, self._entries, self._lossy = sites, entries, lossy
        self._offload = offload
        self._passed: set[Stop] = set()
        self._go = [threading.Semaphore(0) for _ in batches]
        self._back = threading.Semaphore(0)
        self._ready = list(range(len(batches)))
        self._stopping = False
        self._error: BaseException | None = None
        self._parked: dict[int, Parked] = {}
        self._threads: list[threading.Thread] = []
        self._start()

    def _start(self) -> None:
        before = threading.stack_size(STACK)
        try:
            for i in range(len(self._batches)):
                thread = threading.Thread(target=self._work, args=(i,), daemon=True)
                thread.start()
                self._threads.append(thread)
        except RuntimeError:  # the system gives no more threads
            self.close()
            count = f"got {len(self._threads)} threads for {len(self._batches)} micro-batches"
            raise Limited(f"{count}, expected one for each; pass a larger batch size, or fewer samples") from None
        finally:
            threading.stack_size(before)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Stop]:
        """The stops in the order in which they complete. Those who wait go on when the next one is asked for."""
        while True:
            for i in self._ready:
                self._run(i)
            if not self.waiting:
                return
            stop = min(self.waiting)
            yield stop
            self._passed.add(stop)
            self._ready = list(self.waiting.pop(stop))

    def skip(self, stops: Iterable[Stop]) -> None:
        """Lets every thread walk through some stops: what they wait for has been done."""
        self._passed.update(stops)

    def close(self) -> None:
        """Ends every thread, wherever it is. What outlives them, since somebody else has it too, is whole again."""
        self._stopping = True
        for arrived in self.waiting.values():
            arrived.clear()
        self.waiting.clear()
        for go in self._go:
            go.release()
        for thread in self._threads:
            thread.join()
        for parked in self._parked.values():
            parked.fill()

    def _run(self, i: int) -> None:
        """Gives micro-batch `i` the baton until it parks or ends."""
        self._go[i].release()
        self._back.acquire()
        if self._error is not None:
            self._error.add_note(f"in micro-batch {i}")
            raise self._error

    def _park(self, i: int, stop: Stop, brought: Any, live: Live | None) -> None:
        if stop in self._passed:
            return
        parked = Parked(live.storages(), self._offload) if live and self._offload else None
        if parked:
            self._parked[i] = parked
        self.waiting.setdefault(stop, Arrived()).add(i, brought, parked)
        self._back.release()
        self._go[i].acquire()
        if self._stopping:
            raise Abort
        if parked:
            self._parked.pop(i).fill()

    def _work(self, i: int) -> None:
        self._go[i].acquire()
        try:
            if not self._stopping:
                self._forward(i)
        except Abort:
            pass
        except BaseException as error:  # noqa: BLE001  # it is raised again in the thread that asked for the run
            self._error = error
        finally:
            self._back.release()

    def _forward(self, i: int) -> None:
        """One micro-batch's forward. A thread inherits no grad mode and no function mode, so both are entered here."""
        module, batch = copy.deepcopy(self._module), self._batches[i]
        live = Live(self._parked) if self._offload else None
        for path, stop in self._entries.items():
            module.get_submodule(path).register_forward_pre_hook(
                lambda _, args, kwargs, stop=stop: self._park(i, stop, (args, kwargs), live), with_kwargs=True
            )

        def read(use: Use) -> Tensor:
            if use.x is not None:
                self.rows[use.name] = self.rows.get(use.name, 0) + use.x.numel() // use.x.shape[-1]
                if use.name in self._sites:
                    self._park(i, self._sites[use.name], use.x, live)
            with live.others() if live else nullcontext():
                return self._read(use)

        with torch.no_grad(), live or nullcontext(), Interpreter(self._handles, read, self._lossy):
            functional(module, self._names, batch.args, batch.kwargs)

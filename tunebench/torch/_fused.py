"""A graph of torch in which groups of nodes are calls of kernels: what `compile` runs."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx

from tunebench.device import Device
from tunebench.graph.group import Group
from tunebench.serving import Choice, Problem, preference, problem
from tunebench.serving.choice import Made
from tunebench.serving.watch import watched
from tunebench.torch._derived import Derived
from tunebench.torch._memory import launch, stored_type
from tunebench.torch._order import is_laid_out, memory_format
from tunebench.torch._translation import Translation
from tunebench.torch._trial import Trial
from tunebench.workload import Tensor as Specification
from tunebench.workload import Workload
from tunebench.workloads import parse

__all__ = ["Fused", "fused"]


def fused(
    module: fx.GraphModule,
    translation: Translation,
    groups: Iterable[tuple[Group, bool]],
    device: Device,
    ordinal: int,
    *,
    benchmark: bool = False,
) -> tuple[fx.GraphModule, list[Fused]]:
    """Return a module that runs groups by kernels, and all else as before; and these groups.

    Args:
        module: What was traced.
        translation: What it computes.
        groups: Of all of its nodes, in an order in which they can run; and whether kernels of ours run the
            group, wherever they are known to be faster.
        device: Where it runs.
        ordinal: Which of the machine's GPUs that is.
        benchmark: Whether groups are timed against torch at their first calls.
    """
    writer = _Writer(module, translation, device, ordinal, benchmark=benchmark)
    for group, is_ours in groups:
        if is_ours:
            writer.fuse(group)
        else:
            writer.keep(group)
    return writer.finished(), writer.fused


class _Writer:
    """Writes a graph anew, group by group."""

    def __init__(
        self,
        module: fx.GraphModule,
        translation: Translation,
        device: Device,
        ordinal: int,
        *,
        benchmark: bool,
    ) -> None:
        self._module, self._translation = module, translation
        self._device, self._ordinal, self._benchmark = device, ordinal, benchmark
        self._graph = fx.Graph()
        self.fused: list[Fused] = []
        self._written: dict[fx.Node, fx.Node] = {}
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self._copy(node)

    def keep(self, group: Group) -> None:
        """Have a group run by torch."""
        for index in group.nodes:
            self._write(self._call(index))

    def fuse(self, group: Group) -> None:
        """Have a group run by one call."""
        region = _Region(self._translation, group, [self._call(index) for index in group.nodes])
        trial = Trial() if self._benchmark else None
        run = Fused(group, f"group_{len(self.fused)}", self._kernels(group, region), region, trial)
        self.fused.append(run)
        made = self._graph.call_function(run, tuple(self._write(node) for node in region.reads))
        if len(region.gives) == 1:
            self._written[region.gives[0]] = made
            return
        for place, node in enumerate(region.gives):
            self._written[node] = self._graph.call_function(operator.getitem, (made, place))

    def finished(self) -> fx.GraphModule:
        """Return the module."""
        for node in self._module.graph.nodes:
            if node.op == "output":
                self._write(node)
        self._graph.lint()
        return fx.GraphModule(self._module, self._graph)

    def _call(self, index: int) -> fx.Node:
        return self._translation.calls[self._translation.graph.nodes[index].name]

    def _write(self, node: fx.Node) -> fx.Node:
        """Copy a node with what before it is not there yet: views, which belong to no group."""
        if node not in self._written:
            for before in node.all_input_nodes:
                self._write(before)
            self._copy(node)
        return self._written[node]

    def _copy(self, node: fx.Node) -> None:
        self._written[node] = self._graph.node_copy(node, lambda one: self._written[one])

    def _kernels(self, group: Group, region: _Region) -> list[_Kernel]:
        found = []
        for index, text in enumerate(group.workloads):
            workload = parse(text)
            found.append(
                _Kernel(
                    problem(workload, self._device, self._ordinal),
                    tuple(
                        region.input(workload, spec, group.role(index, spec.name))
                        for spec in workload.inputs()
                    ),
                    tuple(
                        region.output(workload, spec, group.role(index, spec.name))
                        for spec in workload.outputs()
                    ),
                )
            )
        return found


# -- a group as a function of tensors ----------------------------------------------------------------------


class _Region:
    """The nodes of a group, with the views between them.

    Attributes:
        reads: Nodes outside whose tensors are read: by torch if it runs the group, or by kernels.
        gives: Nodes inside whose tensors are read outside.
        module: What runs the group by torch, as a function of `reads`.
    """

    def __init__(self, translation: Translation, group: Group, calls: Sequence[fx.Node]) -> None:
        self._translation, self._calls = translation, frozenset(calls)
        self._group = group
        self._inside: dict[fx.Node, bool] = dict.fromkeys(calls, True)
        sources = translation.sources
        written = [value for index in group.nodes for value in translation.graph.nodes[index].writes]
        wanted = [v for v in written if v in sources and not translation.graph.is_inner(v, group.nodes)]
        self.gives = tuple(sources[value] for value in wanted)
        self.values = dict(zip(wanted, self.gives, strict=True))
        self.reads = self._outside()
        self._between: dict[str, int] = {}
        """Places, after what is given, of values that one kernel leaves to the next."""
        self.module = self._by_torch()

    def _is_inside(self, node: fx.Node) -> bool:
        """Tell whether a node is of the group, or a view of what the group gives."""
        if node not in self._inside:
            is_call = node.op != "call_function" or node.name in self._translation.calls
            self._inside[node] = not is_call and any(map(self._is_inside, node.all_input_nodes))
        return self._inside[node]

    def _outside(self) -> tuple[fx.Node, ...]:
        found: dict[fx.Node, None] = {}
        queue = [*self.gives, *self._calls]
        seen = set(queue)
        while queue:
            node = queue.pop()
            for before in node.all_input_nodes:
                if not self._is_inside(before):
                    found[before] = None
                elif before not in seen:
                    seen.add(before)
                    queue.append(before)
        sources = self._translation.sources
        for value in self._group.roles.values():
            if value in self._translation.derived:
                found.update(dict.fromkeys(self._translation.derived[value].parts))
            elif value in sources and not self._is_inside(sources[value]):
                found[sources[value]] = None
        return tuple(found)

    def _by_torch(self) -> fx.GraphModule:
        graph = fx.Graph()
        known = {node: graph.placeholder(node.name) for node in self.reads}

        def copied(node: fx.Node) -> fx.Node:
            if node not in known:
                for before in node.all_input_nodes:
                    copied(before)
                known[node] = graph.node_copy(node, lambda one: known[one])
            return known[node]

        results = tuple(copied(node) for node in self.gives)
        graph.output(results[0] if len(results) == 1 else results)
        return fx.GraphModule(torch.nn.Module(), graph)

    def input(self, workload: Workload, spec: Specification, value: str) -> _Input:
        """Return how a kernel comes to a tensor that it reads."""
        derived = self._translation.derived.get(value)
        if derived is not None:
            return _Derived(tuple(self.reads.index(node) for node in derived.parts), derived)
        if value in self._between:
            return _Given(self._between[value])
        node = self._translation.sources[value]
        place = self.reads.index(node)
        if node.meta["val"].dtype != stored_type(spec.dtype):
            return _Converted(place, stored_type(spec.dtype))
        if is_laid_out(workload, node.meta["val"]) or not self._translation.graph.values[value].memory:
            return _Given(place)
        return _Copied(place, workload)

    def output(self, workload: Workload, spec: Specification, value: str) -> _Output:
        """Return what a tensor that a kernel writes is."""
        node = self.values.get(value)
        if is_left := list(self._group.roles.values()).count(value) > 1:  # for the next kernel
            self._between[value] = len(self.reads) + len(self._between)
        if node is None:
            dtype = stored_type(spec.dtype)
            return _Output(None, spec.shape, None, dtype, None, dtype, is_left)
        told = node.meta["val"]
        how = None if is_laid_out(workload, told) else memory_format(workload, told)
        place, shape, stride = self.gives.index(node), tuple(told.shape), tuple(told.stride())
        return _Output(place, shape, stride, stored_type(spec.dtype), how, told.dtype, is_left)


class _Given:
    """A tensor as it is given."""

    def __init__(self, place: int) -> None:
        self.of = operator.itemgetter(place)


@dataclass(frozen=True, slots=True)
class _Copied:
    """A tensor that is laid out anew."""

    place: int
    workload: Workload

    def of(self, given: Sequence[Tensor]) -> Tensor:
        tensor = given[self.place]
        if self.workload.operator == "gemm" and tensor.stride(-1) != 1 and tensor.stride(-2) == 1:
            return tensor.mT.contiguous().mT  # the problem has it column by column
        return tensor.contiguous(memory_format=memory_format(self.workload, tensor))


@dataclass(frozen=True, slots=True)
class _Converted:
    """A tensor that is read in another type."""

    place: int
    dtype: torch.dtype

    def of(self, given: Sequence[Tensor]) -> Tensor:
        return given[self.place].to(self.dtype)


class _Derived:
    """What is made of other tensors, and made again when one of them has changed."""

    def __init__(self, places: tuple[int, ...], derived: Derived) -> None:
        self._places, self._derived = places, derived
        self._known: tuple[Any, Tensor] | None = None

    def of(self, given: Sequence[Tensor]) -> Tensor:
        parts = [given[place] for place in self._places]
        key = [(part.data_ptr(), part._version) for part in parts]
        if self._known is None or self._known[0] != key:
            self._known = (key, self._derived.of(*(part.detach() for part in parts)))
        return self._known[1]


_Input = _Given | _Copied | _Converted | _Derived


@dataclass(frozen=True, slots=True)
class _Output:
    """A tensor that a kernel writes.

    Attributes:
        place: Among the results; None if nobody reads it.
        shape: As torch has it.
        stride: Likewise; None for contiguous.
        dtype: The type that the kernel writes.
        written_as: The memory format that the kernel writes, if that is another.
        expected_type: Its type, as torch has it.
        is_left: Whether the next kernel reads it.
    """

    place: int | None
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    dtype: torch.dtype
    written_as: torch.memory_format | None
    expected_type: torch.dtype
    is_left: bool

    def empty(self, device: torch.device) -> Tensor:
        """Return memory for it."""
        if self.stride is None or self.written_as is not None:
            how = self.written_as or torch.contiguous_format
            return torch.empty(self.shape, dtype=self.dtype, device=device, memory_format=how)
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)

    def expected(self, written: Tensor) -> Tensor:
        """Return it as torch would have laid it out, in the type that it would have."""
        if self.written_as is None or self.stride is None:
            return written.to(self.expected_type)
        wanted = torch.empty_strided(self.shape, self.stride, dtype=self.expected_type, device=written.device)
        return wanted.copy_(written)


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A problem, and what its tensors are."""

    problem: Problem
    inputs: tuple[_Input, ...]
    outputs: tuple[_Output, ...]


class Fused:
    """A group, by kernels of ours where they are known to be faster, else by torch.

    Attributes:
        group: What it does.
        by_torch: The same by torch.
        trial: What finds out which is the faster, if it is found out here.
        seen: What it was last called with, if `keeps` is true.
        keeps: Whether to keep that.
    """

    def __init__(
        self, group: Group, name: str, kernels: Sequence[_Kernel], region: _Region, trial: Trial | None
    ) -> None:
        self.__name__, self.group, self.trial = name, group, trial
        self._kernels, self._count = tuple(kernels), len(region.gives)
        # Kernels of one problem each are held against torch's; of several, and in a trial, all together are.
        self._is_weighed = trial is not None or len(kernels) > 1
        self.by_torch = region.module.forward
        self.keeps, self.seen = False, tuple[Tensor, ...]()

    def __call__(self, *given: Tensor) -> Any:
        """Run it on the tensors that its nodes read."""
        if self.keeps:
            self.seen = given
        trial, made = self.trial, self._made()
        if watched():
            self._tell(made)
        if self._is_torchs(made):
            return self.by_torch(*given)
        if trial is None or trial.winner is not None:
            return self._by_kernels(made, given)
        return trial.run(
            given[0].device, lambda: self._by_kernels(made, given), lambda: self.by_torch(*given)
        )

    @property
    def by(self) -> Literal["tunebench", "torch"]:
        """Whose kernels run it now."""
        return "torch" if self._is_torchs(self._made()) else "tunebench"

    def _made(self) -> list[Made]:
        preferred = preference()
        if preferred == "faster" and self._is_weighed:
            preferred = "tunebench"
        return [kernel.problem.made(preferred) for kernel in self._kernels]

    def _is_torchs(self, made: Sequence[Made]) -> bool:
        is_lost = self.trial is not None and self.trial.winner == "torch"
        return is_lost or any(one.kernel is None for one in made)

    def _tell(self, made: Sequence[Made]) -> None:
        """Tell watchers whose kernels run it."""
        for kernel, one in zip(self._kernels, made, strict=True):
            if self.trial is not None and self.trial.winner == "torch" and one.kernel is not None:
                reason = f"in this model torch takes {self.trial.ratio:.2f} times as long"
                lost = Choice(workload=kernel.problem.workload, reason=reason)
                kernel.problem.tell(Made(one.generation, lost, None))
            else:
                kernel.problem.tell(one)

    def _by_kernels(self, made: Sequence[Made], given: Sequence[Tensor]) -> Any:
        results: list[Any] = [None] * self._count
        known, device = list(given), given[0].device
        for kernel, one in zip(self._kernels, made, strict=True):
            written = [output.empty(device) for output in kernel.outputs]
            launch(one.kernel, [*(tensor.of(known) for tensor in kernel.inputs), *written])  # type: ignore[arg-type]
            for output, tensor in zip(kernel.outputs, written, strict=True):
                if output.is_left:
                    known.append(tensor)
                if output.place is not None:
                    results[output.place] = output.expected(tensor)
        return results[0] if self._count == 1 else tuple(results)

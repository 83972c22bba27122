"""Values that Python reads before the backward pass of a head: what they decide, heads in several functions.

A head is traced for the way that Python takes in the iteration of the trace. Its function is cut where a
value is read. If the value decides otherwise, a head of another way continues with what was computed, or the
step is repeated in eager mode: what a head writes before the last value is taken back.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tunebench.training.coexecution._call import Number, Operation, flat
from tunebench.training.coexecution._head_copies import RepeatError
from tunebench.training.coexecution._memory import copies_reason
from tunebench.training.coexecution._script import Runner, script_runner

__all__ = [
    "DECIDE", "Computed", "DecidedOtherwiseError", "Piece", "Stage", "TracedReads", "Ways", "evaluate",
    "is_read", "run_stages",
]  # fmt: skip

_MISSES = 2
"""Number of iterations in which values decide as in no head before such a head is traced."""

_MOST_MISSED = 64
"""Number of ways without a head that are counted."""

_DECAY = 0.9
"""Factor of the weight of an iteration for each later one, when the most frequent way is chosen."""


class DecidedOtherwiseError(RepeatError):
    """A value decides otherwise than in the trace; all was taken back.

    Attributes:
        position: Number of decisions before this one.
        outcome: What the value decides.
        computed: What was computed, for a head of another way; None if that was taken back, too.
    """

    def __init__(self, position: int, outcome: Any) -> None:
        super().__init__("a value that Python reads decides otherwise than in the trace")
        self.position = position
        self.outcome = outcome
        self.computed: Computed | None = None
        self.way: tuple[Any, ...] = ()


def DECIDE(value: Any, outcome: Any, position: int) -> None:  # noqa: N802  # a node of a graph
    """Compare what a value decides with the trace.

    Raises:
        DecidedOtherwiseError: It decides otherwise.
    """
    if type(value) is not type(outcome) or value != outcome:
        raise DecidedOtherwiseError(position, value)


def is_read(node: torch.fx.Node) -> bool:
    """Return whether a node reads the value of a tensor."""
    return bool(node.op == "call_method" and node.target == "item")


def evaluate(node: torch.fx.Node, values: dict[Any, Any]) -> Any:
    """Return what a node computes from numbers of Python, by node."""
    return node.target(*(values[leaf] if isinstance(leaf, torch.fx.Node) else leaf for leaf in node.args))


# -- functions of a head -------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False, kw_only=True)
class Piece:
    """Operations up to values that are read, which several ways may share.

    Attributes:
        operations: The operations.
        reads: Indices of the values that are read after them.
        inputs: Indices of values from before the head.
        numbers: Indices of numbers of Python.
        outputs: Indices of the values that any way needs later, which it appends to a list.
        before: The pieces that run before it.
        followers: The pieces that ways run next.
        runner: The function.
        carried: Number of values of the list before it, for which the function is made.
    """

    operations: Sequence[Operation] = ()
    reads: Sequence[int] = ()
    inputs: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    before: list[Piece] = field(default_factory=list)
    followers: list[Piece] = field(default_factory=list)
    runner: Runner | None = None
    carried: int = 0

    def follower(self, operations: Sequence[Operation], reads: Sequence[int], needed: set[int]) -> Piece:
        """Return the piece that runs some operations next.

        Args:
            operations: The operations.
            reads: Indices of the values that are read after them.
            needed: Indices of the values that are needed later.
        """
        made = {index for operation in operations for index in operation.outputs if index is not None}
        for piece in self.followers:
            if piece.operations == operations and piece.reads == reads:
                break
        else:
            before = [*self.before, self]
            read = [index for operation in operations for index in operation.reads()]
            computed = made.union(*(earlier.outputs for earlier in before))
            leaves = (leaf for operation in operations for leaf in flat((operation.args, operation.kwargs)))
            piece = Piece(
                operations=operations,
                reads=reads,
                inputs=[index for index in dict.fromkeys((*read, *reads)) if index not in computed],
                numbers=sorted({leaf.index for leaf in leaves if isinstance(leaf, Number)}),
                before=before,
            )
            self.followers.append(piece)
        missing = (needed & made).difference(piece.outputs)
        if missing:
            piece.outputs += sorted(missing)
            piece.runner = None
        return piece

    def run(self, carry: Any, count: int, inputs: Sequence[Tensor], numbers: Sequence[Any]) -> list[Any]:
        """Append the values that are needed later to a list, and return those that are read.

        Args:
            carry: The list.
            count: The number of its values.
            inputs: The values from before the head.
            numbers: The numbers of Python.
        """
        if self.runner is None or self.carried != count:
            self.carried = count
            self.runner = script_runner(
                self.operations,
                self.inputs,
                dict.fromkeys(self.numbers, float),
                self.reads,
                carried=[index for piece in self.before for index in piece.outputs],
                appended=self.outputs,
            )
        return [tensor.item() for tensor in self.runner(carry, *inputs, *numbers)]


@dataclass(slots=True, kw_only=True)
class Stage:
    """A piece, and what Python does with the values that are read after it.

    Attributes:
        piece: The piece.
        positions: Positions of its inputs among those of the head.
        reads: Nodes that read its values.
        nodes: Nodes that compute numbers of Python or decide, in order.
    """

    piece: Piece
    positions: list[int]
    reads: list[torch.fx.Node]
    nodes: list[torch.fx.Node]


@dataclass(slots=True)
class Computed:
    """What the first stages of a head computed, for a head of another way.

    Attributes:
        pieces: Their pieces.
        inputs: The inputs of each.
        reads: The values that were read after each.
        carry: The list of values that are needed later.
        state: The random state after them, or None if they draw no random numbers.
    """

    pieces: list[Piece] = field(default_factory=list)
    inputs: list[list[Tensor]] = field(default_factory=list)
    reads: list[list[Any]] = field(default_factory=list)
    carry: Any = field(default_factory=lambda: torch._C.ScriptList([]))
    state: Tensor | None = None

    def fits(self, stages: Sequence[Stage], tensors: Sequence[Tensor]) -> bool:
        """Return whether another head with these inputs would compute the same first."""
        return len(stages) >= len(self.pieces) and all(
            stage.piece is piece
            and not piece.numbers
            and all(tensors[at] is tensor for at, tensor in zip(stage.positions, inputs, strict=True))
            for stage, piece, inputs in zip(stages, self.pieces, self.inputs, strict=False)
        )


def run_stages(
    stages: Sequence[Stage],
    tensors: Sequence[Tensor],
    values: dict[Any, Any],
    numbers: Sequence[torch.fx.Node],
    computed: Computed,
) -> None:
    """Run all but the last function of a head.

    Args:
        stages: The stages.
        tensors: The inputs of the head.
        values: Numbers of Python by node; those that are computed are added.
        numbers: The numbers that are inputs of operations.
        computed: What the first stages computed already; the rest is added.

    Raises:
        DecidedOtherwiseError: A value decides otherwise than in the trace.
    """
    count = 0
    for position, stage in enumerate(stages):
        piece = stage.piece
        if position == len(computed.pieces):
            inputs = [tensors[at] for at in stage.positions]
            piece_numbers = [values[numbers[index]] for index in piece.numbers]
            computed.reads.append(piece.run(computed.carry, count, inputs, piece_numbers))
            computed.inputs.append(inputs)
            computed.pieces.append(piece)
        count += len(piece.outputs)
        values.update(zip(stage.reads, computed.reads[position], strict=True))
        try:
            for node in stage.nodes:
                values[node] = evaluate(node, values)
        except DecidedOtherwiseError as error:
            error.computed = computed
            raise


# -- ways ----------------------------------------------------------------------------------------------------


class Ways:
    """The ways that Python takes after it read values, each with heads of its own.

    Attributes:
        are_traced: Whether values that Python reads are traced.
        are_read: Whether a trace ended because a value is read.
        is_missed: Whether values decided otherwise in the last iteration than in any head.
        current: Number of the way whose head runs, or is traced.
        computed: What the head of another way computed in this iteration, or None.
        pieces: The pieces of functions of all ways begin after this empty one.
    """

    def __init__(self) -> None:
        self.are_traced = self.are_read = self.is_missed = False
        self.forget()

    def forget(self) -> None:
        """Forget all ways."""
        self.pieces = Piece()
        self.current = 0
        self.computed: Computed | None = None
        self._count = 1
        self._tried: list[int] = []
        self._scores: dict[int, float] = {}
        self._missed = Counter[tuple[Any, ...]]()

    def begin(self) -> None:
        """Choose the way that was taken most often in the last iterations."""
        self._tried = []
        if len(self._scores) > 1:
            self.current = max(self._scores, key=self._scores.__getitem__)

    def end(self, *, is_taken: bool) -> None:
        """Forget what was computed, and note whether the current way was taken."""
        self.computed = None
        self.is_missed = bool(self._tried) and not is_taken
        if is_taken and self.are_traced:
            self._scores = {way: score * _DECAY for way, score in self._scores.items()}
            self._scores[self.current] = self._scores.get(self.current, 0.0) + 1.0

    def turn(self, error: DecidedOtherwiseError, graphs: Sequence[Any]) -> bool:
        """Choose another way after a value decided otherwise, and return whether it has a head."""
        self._tried.append(self.current)
        self.computed = error.computed
        ways = [
            graph.way
            for graph in graphs
            if graph.reason is None
            and graph.way not in self._tried
            and graph.outcomes[: len(error.way)] == error.way
        ]
        if ways:
            self.current = max(ways, key=lambda way: self._scores.get(way, 0.0))
        return bool(ways)

    def add(self, error: DecidedOtherwiseError) -> bool:
        """Begin a new way, and return whether it is taken often enough."""
        if len(self._missed) > _MOST_MISSED:
            self._missed.clear()
        self._missed[error.way] += 1
        if self._missed[error.way] < _MISSES:
            return False
        self._missed.clear()
        self.computed = None
        self.current, self._count = self._count, self._count + 1
        return True

    def take(self) -> Computed | None:
        """Return what was computed, and forget it."""
        computed, self.computed = self.computed, None
        return computed


# -- traces --------------------------------------------------------------------------------------------------


class TracedReads:
    """Values that Python reads in one trace, computed from the arguments of this iteration.

    Args:
        ways: The ways of the step.
        end: Ends the head for a reason.
        changing: Nodes that change more than tensors: no value that is read depends on them.
        backward: The node that runs a backward pass.
    """

    def __init__(
        self, ways: Ways, end: Callable[[str], None], changing: Sequence[Any], backward: Any
    ) -> None:
        self._ways = ways
        self._end = end
        self._changing = (*changing, backward, DECIDE)
        self._backward = backward
        self._graph: Any = None
        self._values: dict[Any, Any] = {}
        self._state: Tensor | None = None

    def changes(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        """Return changes of Dynamo: a class, the name of a method, and what it becomes."""
        from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable

        return [
            (TensorVariable, "method_item", partial(self._item, TensorVariable.method_item)),
            (TensorVariable, "unpack_var_sequence", partial(_unbound, TensorVariable.unpack_var_sequence)),
            (SymNodeVariable, "evaluate_expr", partial(self._evaluated, SymNodeVariable.evaluate_expr)),
        ]

    def _item(self, item: Any, variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if any(node.target is self._backward for node in tx.output.graph.nodes):
            self._end("a value is read after the backward pass")
        self._ways.are_read = True
        return item(variable, tx, *args, **kwargs)

    def _evaluated(self, evaluated: Any, variable: Any, output: Any = None) -> Any:
        """Return what a value decides in this iteration."""
        from torch._dynamo.guards import install_guard
        from torch._dynamo.source import GlobalStateSource
        from torch._dynamo.symbolic_convert import InstructionTranslator
        from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

        if not self._ways.are_traced or not free_unbacked_symbols(variable.sym_num):
            return evaluated(variable, output)
        output = InstructionTranslator.current_tx().output
        position = sum(node.target is DECIDE for node in output.graph.nodes)
        outcome = self._value(output.graph, variable.as_proxy().node)
        if isinstance(outcome, float):
            self._end("a value that is read decides more than a way")
        proxy = output.create_proxy("call_function", DECIDE, (variable.as_proxy(), outcome, position), {})
        proxy.node.meta["example_value"] = None
        install_guard(GlobalStateSource().make_guard(partial(_guard_way, self._ways, self._ways.current)))
        return outcome

    def _value(self, graph: torch.fx.Graph, node: torch.fx.Node) -> Any:
        """Compute a node for the arguments of this iteration, of which copies are changed."""
        if self._graph is not graph:
            self._graph, self._values, self._state = graph, {}, None
        before, is_enabled = torch.get_rng_state(), torch.is_grad_enabled()
        if self._state is not None:
            torch.set_rng_state(self._state)
        try:
            torch._C._set_grad_enabled(False)
            for step in graph.nodes:
                if step not in self._values and step.target not in self._changing:
                    self._values[step] = self._computed(step)
        except Exception as error:
            self._end(f"a value that is read cannot be computed: {error}")
        finally:
            self._state = torch.get_rng_state()
            torch.set_rng_state(before)
            torch._C._set_grad_enabled(is_enabled)
        return self._values[node]

    def _computed(self, node: torch.fx.Node) -> Any:
        if node.op == "placeholder":
            example = node.meta["grapharg"].example
            if not isinstance(example, Tensor):
                return example
            if copies_reason(example.nbytes) is not None:
                self._end("too little memory for copies")
            return example.detach().clone()
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self._values.__getitem__)
        if node.op == "call_method":
            return getattr(args[0], node.target)(*args[1:], **kwargs)
        if node.op != "call_function" or "autocast" in getattr(node.target, "__name__", ""):
            self._end("a value that is read depends on more than functions")
        return node.target(*args, **kwargs)


def _unbound(unpack: Any, variable: Any, tx: Any, idxes: Any = None) -> Any:
    """Return the rows of a tensor as eager mode makes them: views of one operation."""
    from torch._dynamo.variables.tensor import TensorVariable

    if type(variable) is not TensorVariable:
        return unpack(variable, tx, idxes)
    return variable.call_method(tx, "unbind", [], {}).unpack_var_sequence(tx)


def _guard_way(ways: Ways, way: int, builder: Any, guard: Any) -> None:
    """Let a trace be valid only while its way is the current one."""
    code = ["___current(___ways) == ___way"]
    closure = {"___current": operator.attrgetter("current"), "___ways": ways, "___way": way}
    builder.add_python_lambda_leaf_guard_to_root(code, code, closure)

"""The graph of an exported program with calls of kernels, as a module that AOTInductor compiles."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx.experimental.proxy_tensor import make_fx

from tunebench.dispatch import dispatcher
from tunebench.errors import InputError
from tunebench.graph.partition_plan import PartitionPlan
from tunebench.torch._tensor import device_of
from tunebench.torch.compiler._fused_call import FusedCall, GroupKernel
from tunebench.torch.compiler._group_planner import GroupPlanner, NoGroupsError
from tunebench.torch.compiler.capture import without_log
from tunebench.torch.compiler.decomposition import DECOMPOSITIONS
from tunebench.torch.compiler.saving.kernel import SavedKernel
from tunebench.workloads import parse

__all__ = ["ProgramWithKernels"]

_KERNEL = torch.ops.tunebench.kernel.default
_SAVED = torch.ops.tunebench.saved_kernel.default
_VIEWS = (torch.ops.aten.permute.default, torch.ops.aten.t.default, torch.ops.aten.view.default)
_WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


class ProgramWithKernels:
    """An exported program whose groups are calls of kernels.

    Args:
        program: The program, of inference with constant sizes.

    Attributes:
        module: Its graph, with parameters as attributes.
        kernels: The kernels it calls, by name.
        plans: Plan of the graph as plain data; torch runs groups with a ``reason``.

    Raises:
        InputError: if the program cannot be saved; the message has the reason.
    """

    def __init__(self, program: ExportedProgram) -> None:
        _check(program)
        self.kernels: dict[str, SavedKernel] = {}
        lifted = program.graph_module
        inputs = [node.meta.get("val") for node in lifted.graph.find_nodes(op="placeholder")]
        weights = {
            index: str(spec.target)
            for index, spec in enumerate(program.graph_signature.input_specs)
            if spec.kind in _WEIGHTS
        }
        traced = _traced(torch.func.functionalize(_runner(lifted)), inputs, DECOMPOSITIONS)
        _check_effects(traced, program)
        planner = GroupPlanner(name="model", check=False, constants=frozenset(weights))
        planned = self._planned(planner, traced)
        graph = _traced(_runner(planned), inputs, {})
        self.plans = list(map(_plan_data, planner.plans, planner.fused))
        self._name_kernels(graph)
        self.module: fx.GraphModule = program.module(check_guards=False)
        _replace_graph(self.module, graph, weights)

    def _planned(self, planner: GroupPlanner, module: fx.GraphModule) -> fx.GraphModule:
        (output,) = module.graph.find_nodes(op="output")
        output.meta["desc"] = ()
        try:
            constants = planner.constants or frozenset()
            return planner.rewritten(module, may_run=functools.partial(_is_portable, constants=constants))
        except NoGroupsError:
            return module

    def _name_kernels(self, module: fx.GraphModule) -> None:
        """Replace calls of the kernel that is chosen at run time by calls of the one chosen now."""
        for node in module.graph.find_nodes(op="call_function", target=_KERNEL):
            inputs, workload, layouts = node.args
            where = device_of(inputs[0].meta["val"].device)
            assert not isinstance(where, str)
            bound = dispatcher(parse(workload), *where).bound_choice("tunebench").kernel
            assert bound is not None
            kernel = SavedKernel.of(bound)
            self.kernels[kernel.name] = kernel
            node.target, node.args = _SAVED, (inputs, kernel.name, layouts)


def _plan_data(partition: PartitionPlan, calls: Sequence[FusedCall]) -> dict[str, Any]:
    """Return a plan as plain data, with the groups that torch runs although they were planned for kernels."""
    data, planned = partition.to_json(), iter(calls)
    for group in data["groups"]:
        if group["by"] == "tunebench":
            call = next(planned)
            group |= {"by": call.by, "reason": call.reason}
    return data


def _is_portable(call: FusedCall, constants: frozenset[int]) -> str:
    """Return why the kernels of a group cannot be saved; empty if they can.

    Args:
        call: The group.
        constants: Places of the graph's inputs that are weights.
    """
    try:
        for kernel in call.kernels:
            if kernel.library is not None:  # the graph calls it by itself
                if not all(_is_weight(node, constants) for node in _matrices(call, kernel)):
                    return f"{kernel.library.variant.key} can be saved with constant weights only"
                continue
            bound = kernel.dispatcher.bound_choice("tunebench").kernel
            assert bound is not None
            SavedKernel.of(bound)
    except InputError as error:
        return str(error)
    return ""


def _matrices(call: FusedCall, kernel: GroupKernel) -> list[fx.Node]:
    """Return what oneDNN's primitives multiply by, which AOTInductor expects in the model."""
    names = [tensor.name for tensor in kernel.dispatcher.workload.inputs()]
    inputs: Any = call.region.inputs  # a kernel's tensors are selected among them
    return [kernel.inputs[names.index(name)](inputs) for name in ("b", "b_gate", "b_up") if name in names]


def _is_weight(node: Any, constants: frozenset[int]) -> bool:
    """Return whether a node is a weight, or its transpose."""
    while isinstance(node, fx.Node) and node.target in _VIEWS:
        node = node.all_input_nodes[0]
    if not isinstance(node, fx.Node) or node.op != "placeholder":
        return False
    return node.graph.find_nodes(op="placeholder").index(node) in constants


def _check(program: ExportedProgram) -> None:
    signature = program.graph_signature
    if signature.backward_signature is not None:
        raise InputError("a training step cannot be saved: AOTInductor's packages have no gradients")
    if program.range_constraints:
        sizes = ", ".join(map(str, program.range_constraints))
        raise InputError(
            f"sizes that change ({sizes}) cannot be saved: export the program with constant sizes"
        )
    changed = [spec for spec in signature.output_specs if spec.kind != OutputKind.USER_OUTPUT]
    if changed:
        names = ", ".join(str(spec.target) for spec in changed)
        raise InputError(f"a model that changes its buffers or inputs ({names}) cannot be saved")
    values = [node.meta.get("val") for node in program.graph.find_nodes(op="placeholder")]
    devices = {value.device.type for value in values if isinstance(value, Tensor)}
    if devices != {"cpu"}:
        found = ", ".join(sorted(devices)) or "no tensor"
        raise InputError(f"only models on a CPU can be saved, got {found}")


def _check_effects(traced: fx.GraphModule, program: ExportedProgram) -> None:
    """Check that a functional graph copies nothing to its inputs."""
    specs = program.graph_signature.input_specs
    places = {node: index for index, node in enumerate(traced.graph.find_nodes(op="placeholder"))}
    copies = traced.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    changed = [specs[places[node.args[0]]] for node in copies if node.args[0] in places]
    if changed:
        names = ", ".join(str(spec.target or spec.arg.name) for spec in changed)
        raise InputError(f"a model that changes its buffers or inputs ({names}) cannot be saved")


def _runner(module: fx.GraphModule) -> Callable[..., Any]:
    return lambda *values: fx.Interpreter(module).run(*values, enable_io_processing=False)


def _traced(run: Callable[..., Any], inputs: Sequence[Any], table: Any) -> fx.GraphModule:
    """Return the graph of a function of fake tensors; an input without a tensor is 0 in it."""
    values = [0 if value is None or isinstance(value, str) else value for value in inputs]
    with torch.no_grad(), torch._C._DisableAutocast(), without_log():
        return make_fx(run, decomposition_table=dict(table))(*values)


def _register(module: nn.Module, name: str) -> None:
    """Make a tensor that is a plain attribute a buffer, so that AOTInductor keeps its name."""
    folder, _, last = name.rpartition(".")
    owner = module.get_submodule(folder)
    value = getattr(owner, last)
    if last not in owner._parameters and last not in owner._buffers and isinstance(value, Tensor):
        delattr(owner, last)
        owner.register_buffer(last, value, persistent=False)


def _replace_graph(module: fx.GraphModule, lifted: fx.GraphModule, weights: dict[int, str]) -> None:
    """Replace a module's graph by one that reads weights as inputs.

    Args:
        module: A module with weights as attributes.
        lifted: The new graph, with a placeholder per weight and per input.
        weights: Names of the weights by the place of their placeholder.
    """
    new = fx.Graph()
    new._codegen = module.graph._codegen
    places = lifted.graph.find_nodes(op="placeholder")
    copies: dict[fx.Node, fx.Node] = {}
    inputs = [new.node_copy(node) for node in module.graph.find_nodes(op="placeholder")]
    remaining = iter(inputs)
    for index, place in enumerate(places):
        copies[place] = new.get_attr(weights[index]) if index in weights else next(remaining)
    for name in weights.values():
        _register(module, name)
    for node in lifted.graph.find_nodes(op="get_attr"):
        name = f"_tunebench_{str(node.target).replace('.', '_')}"
        setattr(module, name, functools.reduce(getattr, str(node.target).split("."), lifted))
        _register(module, name)
        node.target = name
    result = new.graph_copy(lifted.graph, copies)
    new.output(tuple(result) if isinstance(result, (list, tuple)) else (result,))
    module.graph = new
    module.recompile()

"""Compilation of graphs by inductor, before which a pass may replace operations by kernels."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import default_partition
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves
from torch.utils._triton import has_triton

from tunebench.errors import InputError
from tunebench.torch.compiler import _kernel_lowering  # noqa: F401 - registers the lowering
from tunebench.torch.compiler._flex_attention import replace_flex_attention
from tunebench.torch.compiler._kernel_operator import keep_primitives, require_layouts
from tunebench.torch.compiler.decomposition import DECOMPOSITIONS
from tunebench.torch.compiler.graph_key import source_hash

if TYPE_CHECKING:
    from tunebench.torch.compiler.capture import Phase

__all__ = [
    "OWN_LIMIT",
    "Rewrite",
    "compile_by_inductor",
    "is_inference",
    "is_repeatable",
    "mutated_inputs",
    "parts_of",
    "rewrite_in_place",
]

OWN_LIMIT: Any = (
    {"isolate_recompiles": True}
    if "isolate_recompiles" in inspect.signature(torch.compile).parameters
    else {}
)
"""Arguments of `torch.compile` with which each compiled model has its own limit of compilations."""

Rewrite = Callable[[fx.GraphModule], fx.GraphModule]
"""Takes the graph of a step, of forward and backward in training, and returns the graph to compile."""


def compile_by_inductor(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    rewrite: Rewrite | None = None,
    *,
    plan: str = "",
    config: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph that Dynamo traced, as `torch.compile` does.

    Without the compiler that inductor needs, torch runs the graph operation by operation.

    Args:
        module: The graph; it is not changed.
        inputs: Its inputs.
        rewrite: Changes the graph of ATen operators, in which only `DECOMPOSITIONS` have been applied. Its
            exceptions are raised.
        plan: Name of what `rewrite` does to this graph, for torch's caches; empty if they must not be used.
        config: Options of inductor.
    """
    patches = dict(config or {})
    devices = {value.device.type for value in inputs if isinstance(value, torch.Tensor)}
    missing = next(filter(None, map(missing_compiler, sorted(devices))), "")
    copied, inner = _copied(module), _by_operators if missing else _inner_compile
    if rewrite is not None:
        patches["joint_custom_pre_pass"] = _RewritingPass(rewrite, _table(missing), plan)
    # AOTAutograd's cache skips the pass: its key must say what the pass does.
    is_cached = functorch_config.enable_autograd_cache and not missing and (rewrite is None or bool(plan))
    with functorch_config.patch(enable_autograd_cache=is_cached):
        return compile_fx(  # type: ignore[no-any-return]
            copied,
            inputs,
            inner_compile=inner,
            decompositions=None if rewrite is None and not missing else dict(DECOMPOSITIONS),
            config_patches=patches or None,
        )


@functools.cache
def missing_compiler(device: str) -> str:
    """Return why inductor cannot compile for a type of device, and warn; empty if it can."""
    try:
        if device == "cpu":
            get_cpp_compiler()
        elif not has_triton():
            raise RuntimeError("Triton cannot compile for this GPU")
    except RuntimeError as error:
        warnings.warn(
            f"torch runs operations one by one, since inductor cannot compile: {error}", stacklevel=2
        )
        return str(error)
    return ""


def _table(missing: str) -> Mapping[Any, Callable[..., Any]]:
    return {} if missing else select_decomp_table()


def _inner_compile(*args: Any, **kwargs: Any) -> Any:
    return compile_fx_inner(*args, **{**kwargs, "get_decomp_fn": select_decomp_table})


def _by_operators(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[[list[Any]], Any]:
    """Return a callable that runs a graph operation by operation."""

    def run(boxed: list[Any]) -> Any:
        arguments = tuple(boxed)
        boxed.clear()  # frees inputs that are no longer needed while the graph runs
        return graph(*arguments)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _copied(module: fx.GraphModule) -> fx.GraphModule:
    """Return a module with its own graph, and with what Dynamo recorded about the module and its inputs."""
    copied = fx.GraphModule(module, _copied_graph(module.graph))
    copied.meta = dict(module.meta)
    for name, value in vars(module).items():
        vars(copied).setdefault(name, value)
    inputs = (graph_module.graph.find_nodes(op="placeholder") for graph_module in (module, copied))
    for node, twin in zip(*inputs, strict=True):
        if hasattr(node, "_dynamo_source"):
            twin._dynamo_source = node._dynamo_source
    return copied


def _copied_graph(graph: fx.Graph) -> fx.Graph:
    new = fx.Graph()
    new.set_codegen(graph._codegen)
    result, output = new.graph_copy(graph, {}, return_output_node=True)
    new.output(result).meta = dict(output.meta)
    return new


class _RewritingPass(CustomGraphPass):  # type: ignore[misc]
    """Rewrites the graph of a step, then decomposes its operators as inductor expects them."""

    def __init__(self, rewrite: Rewrite, table: Mapping[Any, Callable[..., Any]], plan: str) -> None:
        self._rewrite, self._table, self._plan = rewrite, table, plan

    def uuid(self) -> str:
        """Return the version of the generated calls, and the name of the plan.

        The key of inductor's cache contains the rewritten graph itself.
        """
        return f"tunebench {source_hash()} {self._plan}"

    def __call__(self, graph: fx.Graph) -> None:
        module = graph.owning_module
        assert module is not None
        inputs = graph.find_nodes(op="placeholder")
        if is_inference(module):
            replace_flex_attention(module)
        attributes = (getattr(module, str(node.target), None) for node in graph.find_nodes(op="get_attr"))
        if any(isinstance(attribute, fx.GraphModule) for attribute in attributes):
            raise InputError("a graph with control flow")
        if not all("desc" in node.meta for node in inputs):
            return  # the body of a higher-order operator
        _decompose(self._rewrite(module), module, self._table)


def rewrite_in_place(module: fx.GraphModule, rewrite: Rewrite) -> None:
    """Replace the joint graph of a step by a rewritten one of ATen operators.

    Args:
        module: The graph as AOTAutograd traced it, with `DECOMPOSITIONS`.
        rewrite: Changes the graph. Its exceptions are raised.
    """
    _decompose(rewrite(module), module, {})


def is_inference(module: fx.GraphModule) -> bool:
    """Return whether the graph of a step has no gradients."""
    return not any(node.name.startswith("tangents") for node in module.graph.find_nodes(op="placeholder"))


def parts_of(module: fx.GraphModule) -> dict[Phase, fx.GraphModule]:
    """Split the graph of a step by phase: inference, or forward and backward.

    The parts return what the graph copies to its inputs.
    """
    copied = fx.GraphModule(module, _copied_graph(module.graph))
    (output,) = copied.graph.find_nodes(op="output")
    if is_inference(module):
        return {"inference": _without_mutation(copied)}
    descriptions = _descriptions(output)
    count = next(
        index
        for index, description in enumerate(descriptions)
        if description is None or description.is_grad()
    )
    output.meta["desc"] = descriptions
    forward, backward = default_partition(copied, (), num_fwd_outputs=count)
    return {"forward": _without_mutation(forward), "backward": _without_mutation(backward)}


def _descriptions(output: fx.Node) -> list[Any]:
    """Return AOTAutograd's description of each result of a graph; None for a result that is None."""
    return tree_leaves(output.meta["desc"], is_leaf=lambda leaf: leaf is None)  # type: ignore[no-any-return]


def _without_mutation(module: fx.GraphModule) -> fx.GraphModule:
    copies = module.graph.find_nodes(op="call_function", target=_COPY)
    (output,) = module.graph.find_nodes(op="output")
    output.args = ((*output.args[0], *(node.args[1] for node in copies)),)
    for node in copies:
        module.graph.erase_node(node)
    return module


def mutated_inputs(module: fx.GraphModule) -> frozenset[int]:
    """Return the places of the inputs that a step changes, in the graph or by new values that it returns."""
    changed = {
        node.args[0].meta["desc"] for node in module.graph.find_nodes(op="call_function", target=_COPY)
    }
    (output,) = module.graph.find_nodes(op="output")
    changed |= {
        description.mutated_input
        for description in _descriptions(output)
        if hasattr(description, "mutated_input")
    }
    return frozenset(changed_input.idx for changed_input in changed if hasattr(changed_input, "idx"))


_COPY = torch.ops.aten.copy_.default


def is_repeatable(module: fx.GraphModule) -> bool:
    """Return whether a step can be repeated: it has no collective operation, which needs other processes."""
    return not any("c10d" in getattr(node.target, "namespace", "") for node in module.graph.nodes)


def _decompose(
    module: fx.GraphModule, target: fx.GraphModule, table: Mapping[Any, Callable[..., Any]]
) -> None:
    """Replace a module's graph by another one, with the operators that inductor expects.

    Inputs and outputs keep their names and descriptions, which AOTAutograd reads.
    """
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    has_symbols = any(isinstance(node.meta.get("val"), torch.SymInt) for node in inputs)
    with (
        torch.no_grad(),
        torch._C._DisableAutocast(),
        enable_python_dispatcher() if has_symbols else contextlib.nullcontext(),
        torch.fx.traceback.preserve_node_meta(),
    ):
        traced = make_fx(functools.partial(_run, module), decomposition_table=table)(
            *(node.meta.get("val", 0) for node in inputs)
        )
    new = fx.Graph()
    new._codegen = target.graph._codegen
    copies = {}
    for node, twin in zip(inputs, traced.graph.find_nodes(op="placeholder"), strict=True):
        copies[twin] = new.node_copy(node)
    (before,) = target.graph.find_nodes(op="output")
    for node in traced.graph.find_nodes(op="get_attr"):
        name = f"_tunebench_{node.target}"
        setattr(target, name, getattr(traced, str(node.target)))
        node.target = name
    result = new.graph_copy(traced.graph, copies)
    new.output(result).meta = before.meta
    target.graph = new
    require_layouts(new)
    keep_primitives(new)


def _run(module: fx.GraphModule, *values: Any) -> Any:
    return fx.Interpreter(module).run(*values, enable_io_processing=False)

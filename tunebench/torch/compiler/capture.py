"""Capture of a model's step as graphs, traced by `torch.compile` and AOTAutograd without computing it."""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_map_only

from tunebench.errors import InputError
from tunebench.torch.compiler._attention_pattern import fuse_attention
from tunebench.torch.compiler._constant_folding import fold_constants
from tunebench.torch.compiler._flex_attention import read_flex_attention
from tunebench.torch.compiler._rms_norm_pattern import fuse_rms_norms
from tunebench.torch.compiler.decomposition import DECOMPOSITIONS, repeat_casts
from tunebench.torch.compiler.recurrent_layer import divide_recurrent_layers
from tunebench.torch.compiler.translation import Translation, translate

__all__ = [
    "capture",
    "constant_inputs",
    "differentiable_results",
    "first_reason",
    "in_training_mode",
    "is_of_torch",
    "onednn",
    "recurrent_layers_traced",
    "require_equal_types",
    "results_without_data",
    "tracing_backend",
    "whole_model_traced",
    "without_data",
    "without_log",
]

Phase = Literal["inference", "forward", "backward"]
Compiler = Callable[[fx.GraphModule, Phase], Callable[..., Any]]
"""Takes a graph of ATen operators and its phase, and returns a callable that runs it."""


def capture(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    training: bool = False,
    name: str = "",
) -> tuple[Translation, ...]:
    """Return the graphs of a model's step: one for inference, forward and backward for training.

    Nothing is computed, and no memory is needed: the model is traced on tensors without data, so its
    parameters may also be on the device `meta`. The model's mode is restored afterwards. Models that this
    process compiled before with torch are compiled again at their next call.

    If torch cannot trace the model as a whole, the graphs are those of `torch.compile`, and a warning lists
    torch's reasons. The code between graphs is run, with zeros as the results of the graphs.

    Args:
        model: The model.
        args: Positional inputs; only their sizes, types and layouts matter.
        kwargs: Keyword inputs.
        training: Whether to trace the gradients of everything the model returns.
        name: Name of the graphs; the model's class if it is empty.

    Raises:
        InputError: if no graph of the model can be traced; the message has the first line of torch's reason.
    """
    kind = type(model).__name__
    step = functools.partial(_graphs, model, args, kwargs or {}, training=training, name=name or kind)
    try:
        with without_log():
            return step(fullgraph=True)
    except Exception as error:  # the tracer may raise anything; its first line is the reason
        if isinstance(cause := getattr(error, "inner_exception", None), InputError):
            raise cause from None
        reason, whole = first_reason(error), error
    before = counters["graph_break"].copy()
    # The model itself may raise again: the reason is known already.
    with without_log(), contextlib.suppress(Exception):
        graphs = step(fullgraph=False)
        if graphs:
            breaks = dict.fromkeys([reason, *map(_first_line, counters["graph_break"] - before)])
            warnings.warn(
                f"{kind} cannot be traced as a whole, its {len(graphs)} graphs are those of torch.compile: "
                + "; ".join(breaks),
                stacklevel=2,
            )
            return graphs
    raise InputError(f"{kind} cannot be traced as a whole: {reason}") from whole


def _graphs(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    training: bool,
    name: str,
    fullgraph: bool,
) -> tuple[Translation, ...]:
    """Return the graphs that torch traces of a model's step (see `capture`)."""
    graphs: list[Translation] = []

    def keep(graph: fx.GraphModule, phase: Phase) -> Callable[..., Any]:
        require_equal_types(graph.graph)
        graphs.append(translate(graph.graph, name, phase, constant_inputs(phase)))
        return results_without_data(graph, torch.empty_strided if fullgraph else _zeros)

    with (
        without_data(model, args, kwargs) if fullgraph else contextlib.nullcontext((args, kwargs)) as inputs,
        in_training_mode(model, training=training),
        torch.set_grad_enabled(training),
        recurrent_layers_traced(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
        backend = tracing_backend(keep)
        compiled = torch.compile(model, backend=backend, fullgraph=fullgraph, dynamic=False)
        try:
            result = compiled(*inputs[0], **inputs[1])
            if training:
                _differentiate(result)
        finally:
            torch._dynamo.reset()
    return tuple(graphs)


@contextlib.contextmanager
def recurrent_layers_traced() -> Iterator[None]:
    """Trace RNN, GRU and LSTM as the operations of all their time steps; torch refuses them by default."""
    with onednn(enabled=False), whole_model_traced():
        yield


@contextlib.contextmanager
def whole_model_traced() -> Iterator[None]:
    """Trace what torch refuses in a whole graph by default: recurrent layers, and messages to a logger.

    The messages are left out of the graph.
    """
    options: dict[str, Any] = {"allow_rnn": True}
    if hasattr(torch._dynamo.config, "ignore_logging_functions"):  # torch 2.10 or newer
        messages = {
            function
            for name, function in vars(logging.Logger).items()
            if name.startswith(_MESSAGES) and callable(function)
        }
        options["ignore_logging_functions"] = torch._dynamo.config.ignore_logging_functions | messages
    with torch._dynamo.config.patch(**options):
        yield


_MESSAGES = ("debug", "info", "warn", "error", "exception", "critical", "log")
"""Beginnings of the names of methods that log, also of those that libraries add, such as ``warning_once``."""


@contextlib.contextmanager
def onednn(*, enabled: bool) -> Iterator[None]:
    """Choose whether torch may use oneDNN, whose operator for an LSTM has no gradient once it was traced."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(enabled)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def require_equal_types(graph: fx.Graph) -> None:
    """Raise InputError if a product reads tensors of several types, which torch traces but cannot compute.

    Args:
        graph: A graph of AOTAutograd.
    """
    for node in graph.nodes:
        if getattr(node.target, "overloadpacket", None) in _PRODUCTS:
            values = (source.meta.get("val") for source in node.all_input_nodes)
            types = dict.fromkeys(str(value.dtype) for value in values if isinstance(value, Tensor))
            if len(types) > 1:
                raise InputError(
                    f"{node.target} must read tensors of one type, found {' and '.join(types)}: pass inputs "
                    "of the type of the parameters"
                )


_PRODUCTS = frozenset(
    getattr(torch.ops.aten, name) for name in ("mm", "addmm", "bmm", "baddbmm", "convolution")
)


@contextlib.contextmanager
def without_log() -> Iterator[None]:
    """Silence torch's log of errors on tensors without data; the exception has the reason."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


def first_reason(error: BaseException) -> str:
    """Return the first line of an error of the tracer, and of the error of torch or the model behind it."""
    first = error
    while (cause := first.__cause__ or first.__context__) is not None:
        first = cause
    if first is error:
        return f"{_first_line(error)}{_user_line(error)}"
    return f"{_first_line(error)}: {type(first).__name__}: {_first_line(first)}{_user_line(error)}"


def _user_line(error: BaseException) -> str:
    """Return where the model does what torch refused, as in `` (model.py:12)``; empty if it is not known."""
    stack = getattr(error, "real_stack", None)
    frames = [frame for frame in stack or () if not is_of_torch(frame.filename)]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def is_of_torch(path: str) -> bool:
    """Return whether a source file is one of torch."""
    return path.startswith(_TORCH_FOLDER)


_TORCH_FOLDER = str(Path(torch.__file__).parent)


def _first_line(reason: object) -> str:
    return next(iter(str(reason).strip().splitlines()), type(reason).__name__)


def tracing_backend(compiler: Compiler) -> Callable[..., Any]:
    """Return a backend of `torch.compile` that passes AOTAutograd's graphs to a compiler.

    Args:
        compiler: The compiler.
    """

    def of(phase: Phase) -> Callable[..., Any]:
        def compiled(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
            if phase == "inference":
                fuse_attention(graph.graph)
                fuse_rms_norms(graph.graph)
                graph.recompile()
            fold_constants(graph)
            repeat_casts(graph.graph)
            if phase == "inference":
                read_flex_attention(graph)
            run = compiler(graph, phase)

            def boxed(values: list[Any]) -> Any:
                arguments = tuple(values)
                values.clear()  # frees inputs that are no longer needed while the graph runs
                return run(*arguments)

            boxed._boxed_call = True  # type: ignore[attr-defined]
            return boxed

        return compiled

    compiled_graph: Callable[..., Any] = aot_autograd(
        fw_compiler=of("forward"),
        bw_compiler=of("backward"),
        inference_compiler=of("inference"),
        decompositions=DECOMPOSITIONS,
    )

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        divide_recurrent_layers(graph)
        run: Callable[..., Any] = compiled_graph(graph, inputs)
        return run

    return backend


def constant_inputs(phase: Phase) -> frozenset[int]:
    """Return the places of the inputs that are the same in every inference step: parameters and buffers."""
    context = TracingContext.try_get()
    if phase != "inference" or context is None or context.fw_metadata is None:
        return frozenset()
    return frozenset(context.fw_metadata.static_input_indices)


@contextlib.contextmanager
def in_training_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Set a model's mode; restore its mode and its buffers afterwards."""
    modes = {module: module.training for module in model.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()] if training else []
    with contextlib.suppress(NotImplementedError):  # an exported program keeps the mode of its export
        model.train(training)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


@contextlib.contextmanager
def without_data(model: nn.Module, args: Any, kwargs: Any) -> Iterator[tuple[Any, Any]]:
    """Replace parameters and buffers by tensors that have no data, and restore them afterwards.

    Yields:
        The inputs, with such tensors as well.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if type(tensor) not in (Tensor, nn.Parameter):
            return tensor
        if id(tensor) not in fakes:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            device = torch.device("cpu") if tensor.is_meta else tensor.device
            made = FakeTensor(mode, empty, device).requires_grad_(tensor.requires_grad)
            is_parameter = isinstance(tensor, nn.Parameter)
            fakes[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if is_parameter else made
        return fakes[id(tensor)]

    tables = [table for module in model.modules() for table in (module._parameters, module._buffers)]
    originals = [dict(table) for table in tables]
    try:
        for table in tables:
            table.update({name: fake(tensor) for name, tensor in table.items() if tensor is not None})
        inputs = tree_map_only(Tensor, fake, (args, kwargs))
        with mode:
            yield inputs
    finally:
        for table, before in zip(tables, originals, strict=True):
            table.update(before)


def results_without_data(
    graph: fx.GraphModule, allocate: Callable[..., Tensor] = torch.empty_strided
) -> Callable[..., Any]:
    """Return a callable that allocates tensors of a graph's result shapes instead of computing them."""
    (output,) = [node for node in graph.graph.nodes if node.op == "output"]

    def run(*_: Any) -> Any:
        return [_memory(node, allocate) for node in output.args[0]]

    return run


def _memory(node: Any, allocate: Callable[..., Tensor]) -> Any:
    traced = node.meta.get("val") if isinstance(node, fx.Node) else node
    if not isinstance(traced, Tensor):
        return traced
    return allocate(traced.shape, traced.stride(), dtype=traced.dtype, device=traced.device)


def _zeros(*shape: Any, **kind: Any) -> Tensor:
    return torch.empty_strided(*shape, **kind).zero_()


def _differentiate(result: Any) -> None:
    results = differentiable_results(result)
    if not results:
        raise ValueError("the model returns nothing that requires a gradient")
    torch.autograd.grad(results, _inputs_of(results), [torch.zeros_like(result) for result in results])


def differentiable_results(result: Any) -> list[Tensor]:
    """Return the tensors that require a gradient in what a model returned."""
    leaves = torch.utils._pytree.tree_leaves(result)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def _inputs_of(results: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaf tensors that results depend on."""
    leaves: dict[int, Tensor] = {}
    queue = [result.grad_fn for result in results]
    seen = set()
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves[id(node.variable)] = node.variable
        queue += [before for before, _ in node.next_functions]
    return list(leaves.values())

"""Learn paths from recorded iterations: merge, build segments, and check them against eager mode."""

from __future__ import annotations

from tunebench.training.coexecution._building import build
from tunebench.training.coexecution._call import Variable
from tunebench.training.coexecution._function import Kind
from tunebench.training.coexecution._memory import return_freed_memory
from tunebench.training.coexecution._merging import merge
from tunebench.training.coexecution._path import End, Node, PathTree, clear
from tunebench.training.coexecution._recorder import Recorder
from tunebench.training.coexecution._run import difference
from tunebench.training.coexecution._runner import forget
from tunebench.training.coexecution._sizes import Size

__all__ = ["learn", "release", "return_memory"]

_PATHS = 64
"""Number of paths that are kept, those that were taken last."""

_OPERATIONS = 8192
"""Number of operations of the paths that are kept, if several are.

Source: an operation takes 6.6 KB, mostly TorchScript's copies of its graph (498 operations of
music_transformer), so all take about 50 MiB. Three programs of `benchmarks.programs` with several paths that
repeat have at most 1,100 operations.
"""

_SCRIPTS = (True, False)
"""Whether TorchScript runs segments, in the order of preference; else the same calls as in eager mode do."""


def learn(tree: PathTree, recorder: Recorder) -> tuple[str, str] | None:
    """Merge a recorded iteration into the paths; return why and where it can only run eagerly, or None."""
    if recorder.problem is not None:
        return recorder.problem
    if not recorder.calls:
        return None
    end = End(
        gradients=_gradients(recorder),
        escaping=_escaping(recorder),
        specs=recorder.tensors.specs,
        roots=recorder.tensors.roots(),
        bases=recorder.tensors.bases(),
    )
    tree.size = max(tree.size, recorder.size)
    nodes, end = merge(tree, recorder.calls, end)
    tree.use(end)
    tree.forget(_PATHS, _OPERATIONS)
    end.histories |= _histories(recorder)
    if any(end.specs[index].has_history and index not in end.histories for index in end.escaping):
        end.refused = "a tensor with a history of autograd outlives the iteration"
    sharing = tree.sharing(nodes[0], end)
    reason = end.refused or _differing(recorder, nodes, end, sharing, tree.sizes)
    if reason is not None:
        tree.abandon(nodes, end)
        for path in ((nodes, end), *sharing):
            clear(*path)
    for others, other in tree.paths:
        if other.ready and other is not end and other.segment is None:
            build(others, other, scripts=_SCRIPTS[other.runners])
    if end.refused is not None:
        return end.refused, recorder.calls[-1].site
    if reason is None:
        end.ready = True
        tree.enliven(nodes)
    return None


def _differing(
    recorder: Recorder,
    nodes: list[Node],
    end: End,
    sharing: list[tuple[list[Node], End]],
    sizes: dict[int, Size],
) -> str | None:
    """Build the segments of a path; return how their results differ from those of eager mode, or None.

    The next record of the path tries the next runners, because a record can be checked once.

    Args:
        recorder: The record.
        nodes: The nodes of its path.
        end: Its end.
        sharing: Paths with which it shares calls, and so their runners.
        sizes: The sizes of the step's paths, by index.
    """
    end.runners = max([end.runners, *(other.runners for _, other in sharing)])
    clear(nodes, end)
    try:
        build(nodes, end, scripts=_SCRIPTS[end.runners])
        return_memory(recorder)
        reason = difference(recorder, nodes, end, sizes)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
    if reason is not None:
        end.runners += 1
        if end.runners == len(_SCRIPTS):
            end.refused = f"its graph gives other results: {reason}"
    return reason


_RETURNED_BYTES = 1 << 25
"""Bytes of results of a recorded iteration from which on freed memory is returned: it takes milliseconds."""


def return_memory(recorder: Recorder) -> None:
    """Return freed memory to the system: a record leaves small objects between tensors that are gone."""
    if recorder.made_bytes >= _RETURNED_BYTES:
        return_freed_memory()


def release(tree: PathTree) -> None:
    """Forget all paths, and return their memory to the system."""
    tree.forget(0)
    forget()
    return_freed_memory()


def _escaping(recorder: Recorder) -> set[int]:
    return {
        index
        for index, spec in enumerate(recorder.tensors.specs)
        if not spec.given and recorder.tensors.object(index) is not None
    }


def _histories(recorder: Recorder) -> dict[int, str]:
    """Return the names of histories that are spent, of tensors that outlived the iteration."""
    found = {}
    for index, history in recorder.spent.items():
        tensor = recorder.tensors.object(index)
        if tensor is not None and tensor.grad_fn is history:
            found[index] = type(history).__name__
    return found


def _gradients(recorder: Recorder) -> dict[int, Variable]:
    """Return the leaves whose gradients are results at the end."""
    changed: set[int] = set()
    for call in recorder.calls:
        changed |= {leaf for leaf, _ in call.gradients}
        if call.kind is Kind.SET_GRADIENT:
            changed.add(call.args[0].index)
    found: dict[int, Variable] = {}
    for leaf in changed:
        tensor = recorder.tensors.object(leaf)
        gradient = tensor.grad if tensor is not None else None
        index = recorder.tensors.index_of(gradient) if gradient is not None else None
        if index is not None and not recorder.tensors.specs[index].given:
            found[leaf] = Variable(index)
    return found

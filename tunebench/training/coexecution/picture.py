"""Picture of a trace graph as SVG: the lines of a step, the paths between them, and who runs them."""

from __future__ import annotations

import html
import itertools
import linecache
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath

from tunebench.training.coexecution._function import Kind
from tunebench.training.coexecution._path import PathTree
from tunebench.training.coexecution.trace_graph import TracedOperation, TraceGraph

__all__ = ["feed_sites", "fetch_sites", "segment_runners", "trace_graph_svg"]

Line = tuple[str, ...]
"""Call stack within the step, outermost first, each ``file:line``; empty for the start and the end."""

_START: Line = ()
_END: Line = ("end",)

_FEWEST_LINES = 5
"""Lines to tell apart before the callers of operations are enough to tell them apart."""

_MOST_OPERATORS = 4
"""Names of operators to list per line."""

_CHARACTERS = 66
"""Width of a line of source."""

_COLOURS = ("#3b6fb6", "#2e8b57", "#b8860b", "#8e5aa8", "#c0504d", "#4f9da6")
_GREY = "#c3c9d0"
_ROW, _PAD, _GAP_X, _GAP_Y, _CHARACTER = 32, 8, 28, 44, 6.65
_LANE = 16
"""Width of an edge that passes a row of boxes."""


@dataclass(slots=True, eq=False)
class _Box:
    """Lines that always follow one another, or an edge on its way past a layer.

    Attributes:
        lines: The lines, in order; empty for an edge.
        layer: Index of its layer from the top.
        x: Left edge in pixels.
        y: Upper edge in pixels.
        width: Width in pixels.
        height: Height in pixels.
    """

    lines: list[Line]
    layer: int = 0
    x: float = 0.0
    y: float = 0.0
    width: float = _LANE
    height: float = 0.0

    @property
    def middle(self) -> float:
        return self.x + self.width / 2


@dataclass(slots=True)
class _Layout:
    """Boxes with their places, and the edges between them.

    Attributes:
        boxes: All boxes.
        edges: Boxes that an edge passes, from its start to its end.
        loops: Edges that lead back up: start and end.
    """

    boxes: list[_Box]
    edges: list[list[_Box]] = field(default_factory=list)
    loops: list[tuple[_Box, _Box]] = field(default_factory=list)


def trace_graph_svg(
    graph: TraceGraph,
    *,
    title: str = "",
    runners: Mapping[str, str] | None = None,
    fetches: Collection[str] = (),
    feeds: Collection[str] = (),
) -> str:
    """Return a picture of a trace graph as SVG with a white background.

    A box holds source lines of the step that always ran one after another, each with its operations. Edges
    are the paths that iterations took; a dashed edge leads back to an earlier line.

    Args:
        graph: The graph.
        title: Lines of text above the picture.
        runners: Who runs the operations of a call site ``file:line``; without it, all lines look the same.
        fetches: Call sites where Python reads values of tensors.
        feeds: Call sites where Python passes values to the graph.
    """
    operations = sorted(graph.operations())
    line_of = _line_of(operations)
    by_line: dict[Line, list[TracedOperation]] = defaultdict(list)
    for operation in operations:
        by_line[line_of(operation)].append(operation)
    one_file = len({line[-1].rpartition(":")[0] for line in by_line}) == 1
    layout = _layout(_edges(graph, line_of))
    names = sorted({*(runners or {}).values()})
    colours = dict(zip(names, itertools.cycle(_COLOURS)))
    rows = {
        line: _Row(
            source=_source(line, with_file=not one_file),
            operations=_summary(found),
            runner=_most([(runners or {}).get(each.site[-1]) for each in found if each.site]),
            fetches=_reads(found, fetches),
            feeds=any(each.site and each.site[-1] in feeds for each in found),
        )
        for line, found in by_line.items()
    }
    return _written(layout, rows, title.splitlines(), colours)


# -- who runs what -------------------------------------------------------------------------------------------


def segment_runners(tree: PathTree) -> dict[str, str]:
    """Return who runs the operations of each call site of paths that can be co-executed."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for nodes, end in tree.paths:
        waiting: list[str] = []
        for node in nodes if end.ready else ():
            waiting.append(node.call.site)
            if node.segment is not None:
                for site in waiting:
                    found[site][node.segment.runner] += 1
                waiting.clear()
        if end.ready and end.segment is not None:
            for site in waiting:
                found[site][end.segment.runner] += 1
    return {site: counts.most_common(1)[0][0] for site, counts in found.items()}


def fetch_sites(tree: PathTree) -> frozenset[str]:
    """Return the call sites at which Python reads values of tensors."""
    return frozenset(
        node.call.site for nodes, _ in tree.paths for node in nodes if node.call.kind is Kind.FETCH
    )


def feed_sites(tree: PathTree) -> frozenset[str]:
    """Return the call sites at which Python makes tensors of other values."""
    return frozenset(
        node.call.site for nodes, _ in tree.paths for node in nodes if node.call.kind is Kind.CREATE
    )


# -- lines ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """What the picture says of a line."""

    source: str
    operations: str
    runner: str | None
    fetches: bool
    feeds: bool


def _line_of(operations: Iterable[TracedOperation]) -> Callable[[TracedOperation], Line]:
    """Return a function from an operation to its line: as few callers as tell a few lines apart."""
    sites = {operation.site or ("elsewhere",) for operation in operations}
    deepest = max(map(len, sites), default=1)
    depth = next(
        (depth for depth in range(1, deepest) if len({site[:depth] for site in sites}) >= _FEWEST_LINES),
        deepest,
    )
    return lambda operation: (operation.site or ("elsewhere",))[:depth]


def _edges(graph: TraceGraph, line_of: Callable[[TracedOperation], Line]) -> dict[Line, set[Line]]:
    """Return the lines that followed each line."""
    following: dict[Line, set[Line]] = defaultdict(set)
    for before, after in graph.edges:
        left = _START if before is None else line_of(before)
        right = _END if after is None else line_of(after)
        if left != right:
            following[left].add(right)
    return following


def _number(line: Line) -> tuple[tuple[str, int], ...]:
    """Return a key that sorts lines by file and number."""
    parts = [site.rpartition(":") for site in line]
    return tuple((name, int(number) if number.isdigit() else 0) for name, _, number in parts)


def _source(line: Line, *, with_file: bool) -> str:
    name, _, number = line[-1].rpartition(":")
    text = linecache.getline(name, int(number)).strip() if number.isdigit() else ""
    return f"{PurePath(name).name}:{number}  {text}" if with_file and name else f"{number:>4}  {text}"


def _summary(operations: Iterable[TracedOperation]) -> str:
    """Return the number of different operations, and the most frequent operators."""
    different = {(each.operator, each.site, each.occurrence) for each in operations}
    names = Counter(operator.removeprefix("aten::").split(".")[0] for operator, _, _ in different)
    listed = ", ".join(
        name if count == 1 else f"{name} \N{MULTIPLICATION SIGN}{count}"
        for name, count in sorted(names.items(), key=lambda item: (-item[1], item[0]))[:_MOST_OPERATORS]
    )
    more = ", …" if len(names) > _MOST_OPERATORS else ""
    return f"{len(different)} operation{'s' if len(different) > 1 else ''}: {listed}{more}"


def _shortened(text: str, characters: int) -> str:
    return text if len(text) <= characters else text[: characters - 1] + "…"


def _most(values: Iterable[str | None]) -> str | None:
    counts = Counter(value for value in values if value is not None)
    return min(counts, key=lambda value: (-counts[value], value)) if counts else None


def _reads(operations: Iterable[TracedOperation], fetches: Collection[str]) -> bool:
    return any(
        "_local_scalar_dense" in each.operator or (each.site and each.site[-1] in fetches)
        for each in operations
    )


# -- layout --------------------------------------------------------------------------------------------------


def _layout(following: Mapping[Line, set[Line]]) -> _Layout:
    """Return boxes in layers: an edge leads down, except for those that close a loop."""
    forward, back = _directed(following)
    before: dict[Line, set[Line]] = defaultdict(set)
    for line, after in following.items():
        for each in after:
            before[each].add(line)
    box_of: dict[Line, _Box] = {}
    layout = _Layout([])
    for line in forward:
        if line in box_of:
            continue
        chain = [line]
        while len(after := following.get(chain[-1], set())) == 1:
            (each,) = after
            if each in (_END, *chain) or len(before[each]) > 1 or chain[-1] == _START or each in box_of:
                break
            chain.append(each)
        box = _Box(chain)
        layout.boxes.append(box)
        box_of.update(dict.fromkeys(chain, box))
    pairs = {
        (box_of[line], box_of[each])
        for line, after in forward.items()
        for each in after
        if box_of[line] is not box_of[each]
    }
    _set_layers(layout.boxes, pairs)
    layout.loops = [(box_of[line], box_of[each]) for line, each in back]
    _route(layout, sorted(pairs, key=lambda pair: (_number(pair[0].lines[0]), _number(pair[1].lines[0]))))
    return layout


def _directed(following: Mapping[Line, set[Line]]) -> tuple[dict[Line, list[Line]], list[tuple[Line, Line]]]:
    """Return the edges that close no loop, with lines in topological order, and those that do."""
    forward: dict[Line, list[Line]] = {}
    back: list[tuple[Line, Line]] = []
    order: list[Line] = []
    open_lines = {_START}
    pending = [(_START, iter(sorted(following.get(_START, ()), key=_number)))]
    forward[_START] = []
    while pending:
        line, rest = pending[-1]
        each = next(rest, None)
        if each is None:
            open_lines.discard(line)
            order.append(line)
            pending.pop()
        elif each in open_lines:
            back.append((line, each))
        else:
            forward[line].append(each)
            if each not in forward:
                forward[each] = []
                open_lines.add(each)
                pending.append((each, iter(sorted(following.get(each, ()), key=_number))))
    return {line: forward[line] for line in reversed(order)}, back


def _set_layers(boxes: list[_Box], pairs: set[tuple[_Box, _Box]]) -> None:
    """Put each box below all boxes that lead to it; boxes are in topological order."""
    after: dict[int, list[_Box]] = defaultdict(list)
    for left, right in pairs:
        after[id(left)].append(right)
    for box in boxes:
        for each in after[id(box)]:
            each.layer = max(each.layer, box.layer + 1)


def _route(layout: _Layout, pairs: list[tuple[_Box, _Box]]) -> None:
    """Add a lane for each edge in each layer that it passes, order the layers, and place all boxes."""
    for left, right in pairs:
        lanes = [_Box([], layer=layer) for layer in range(left.layer + 1, right.layer)]
        layout.edges.append([left, *lanes, right])
        layout.boxes += lanes
    count = max(box.layer for box in layout.boxes) + 1
    layers: list[list[_Box]] = [[box for box in layout.boxes if box.layer == layer] for layer in range(count)]
    near: dict[int, list[_Box]] = defaultdict(list)
    for edge in layout.edges:
        for left, right in itertools.pairwise(edge):
            near[id(left)].append(right)
            near[id(right)].append(left)
    for box in layout.boxes:
        if box.lines:
            longest = 8 if box.lines[0] in (_START, _END) else _CHARACTERS + 4
            box.width = longest * _CHARACTER + 2 * _PAD
            box.height = _PAD + (24 if box.lines[0] in (_START, _END) else _ROW * len(box.lines) + _PAD)
    for sweep in range(15):
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            _place(layer, near)
    leftmost = min(box.x for box in layout.boxes)
    y = 0.0
    for layer in layers:
        for box in layer:
            box.x, box.y = box.x - leftmost, y
        height = max(box.height for box in layer)
        for box in layer:
            box.height = box.height if box.lines else height
        y += height + _GAP_Y


def _place(layer: list[_Box], near: Mapping[int, list[_Box]]) -> None:
    """Move the boxes of a layer to the mean of their neighbours, without overlaps."""

    def wish(box: _Box) -> float:
        around = near[id(box)]
        return sum(each.middle for each in around) / len(around) if around else box.middle

    wishes = {id(box): wish(box) for box in layer}
    layer.sort(key=lambda box: wishes[id(box)])
    x = 0.0
    for box in layer:
        box.x = x
        x += box.width + _GAP_X
    shift = sum(wishes[id(box)] - box.middle for box in layer) / len(layer)
    for box in layer:
        box.x += shift


# -- drawing -------------------------------------------------------------------------------------------------


def _written(layout: _Layout, rows: Mapping[Line, _Row], title: list[str], colours: Mapping[str, str]) -> str:
    margin, legend = 24, _legend(rows, colours)
    top = margin + 18 * len(title) + (28 if legend else 8)
    right = max(box.x + box.width for box in layout.boxes)
    width = max(right + 2 * margin + 14 * len(layout.loops) + 24, 520)
    height = max(box.y + box.height for box in layout.boxes) + top + margin
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="Helvetica, Arial, sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="#555555"/></marker></defs>',
    ]
    for number, text in enumerate(title):
        y, weight = margin + 6 + 18 * number, ' font-weight="bold" font-size="14"' if number == 0 else ""
        parts.append(f'<text x="{margin}" y="{y}"{weight} fill="#222222">{_escaped(text)}</text>')
    parts.append(f'<g transform="translate({margin},{margin + 18 * len(title)})">{legend}</g>')
    parts.append(f'<g transform="translate({margin},{top})">')
    parts += [_edge(edge) for edge in layout.edges]
    parts += [
        _loop(start, end, right + 14 * (number + 1)) for number, (start, end) in enumerate(layout.loops)
    ]
    parts += [_box(box, rows, colours) for box in layout.boxes if box.lines]
    return "\n".join([*parts, "</g>", "</svg>"]) + "\n"


def _legend(rows: Mapping[Line, _Row], colours: Mapping[str, str]) -> str:
    named = dict(colours)
    if colours and any(row.runner is None for row in rows.values()):
        named["eager mode"] = _GREY
    entries = [
        (f'<rect width="10" height="10" y="-9" fill="{colour}"/>', name) for name, colour in named.items()
    ]
    if any(row.fetches for row in rows.values()):
        entries.append((_mark("fetch", 5, -4), "Python reads a value"))
    if any(row.feeds for row in rows.values()):
        entries.append((_mark("feed", 5, -4), "Python passes a value"))
    x, parts = 0.0, []
    for shape, name in entries:
        parts.append(
            f'<g transform="translate({x:.0f},12)">{shape}'
            f'<text x="16" fill="#222222">{_escaped(name)}</text></g>'
        )
        x += 36 + 6.2 * len(name)
    return "".join(parts)


def _mark(kind: str, x: float, y: float) -> str:
    """Return a triangle out of the graph for a fetch, into it for a feed."""
    d = 5 if kind == "fetch" else -5
    colour = "#c0504d" if kind == "fetch" else "#2e8b57"
    return f'<path d="M{x - d},{y - 5} L{x + d},{y} L{x - d},{y + 5} z" fill="{colour}"/>'


def _box(box: _Box, rows: Mapping[Line, _Row], colours: Mapping[str, str]) -> str:
    if box.lines[0] in (_START, _END):
        text = "start" if box.lines[0] == _START else "end"
        return (
            f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height}" rx="16" '
            f'fill="#444444"/><text x="{box.middle:.1f}" y="{box.y + 20:.1f}" text-anchor="middle" '
            f'fill="#ffffff">{text}</text>'
        )
    parts = [
        f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.width:.1f}" height="{box.height}" rx="4" '
        f'fill="#f7f8fa" stroke="#9aa3ad"/>'
    ]
    for number, line in enumerate(box.lines):
        y = box.y + _PAD + _ROW * number
        row = rows[line]
        source, summary = _shortened(row.source, _CHARACTERS), _shortened(row.operations, _CHARACTERS + 14)
        colour = colours.get(row.runner or "", _GREY)
        parts.append(
            f"<g><title>{_escaped(' → '.join(line))}: {_escaped(row.operations)}</title>"
            f'<rect x="{box.x:.1f}" y="{y:.1f}" width="5" height="{_ROW - 3}" fill="{colour}"/>'
            f'<text x="{box.x + 13:.1f}" y="{y + 12:.1f}" font-family="Menlo, Consolas, monospace" '
            f'font-size="11" fill="#1c1f23" xml:space="preserve">{_escaped(source)}</text>'
            f'<text x="{box.x + 13:.1f}" y="{y + 25:.1f}" font-size="10" fill="#5c6670">'
            f"{_escaped(summary)}</text></g>"
        )
        if row.fetches:
            parts.append(_mark("fetch", box.x + box.width - 10, y + 10))
        if row.feeds:
            parts.append(_mark("feed", box.x + box.width - 24, y + 10))
    return "".join(parts)


def _edge(edge: list[_Box]) -> str:
    start = edge[0]
    points = [(start.middle, start.y + start.height)]
    for lane in edge[1:-1]:
        points += [(lane.middle, lane.y), (lane.middle, lane.y + lane.height)]
    points.append((edge[-1].middle, edge[-1].y - 1))
    path = f"M{points[0][0]:.1f},{points[0][1]:.1f}"
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        bend = (y1 - y0) / 2
        path += f" C{x0:.1f},{y0 + bend:.1f} {x1:.1f},{y1 - bend:.1f} {x1:.1f},{y1:.1f}"
    return f'<path d="{path}" fill="none" stroke="#555555" marker-end="url(#arrow)"/>'


def _loop(start: _Box, end: _Box, x: float) -> str:
    y0, y1 = start.y + start.height - 6, end.y + 10
    return (
        f'<path d="M{start.x + start.width:.1f},{y0:.1f} L{x:.1f},{y0:.1f} L{x:.1f},{y1:.1f} '
        f'L{end.x + end.width + 1:.1f},{y1:.1f}" fill="none" stroke="#555555" stroke-dasharray="4 3" '
        f'stroke-linejoin="round" marker-end="url(#arrow)"/>'
    )


def _escaped(text: str) -> str:
    return html.escape(text, quote=True)

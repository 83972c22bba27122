"""Costs of pipeline stages that a file or numbers state, such as measured ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from tunebench._foreign_file import interpreting, read_table
from tunebench.errors import InputError, UnknownName
from tunebench.training.interconnect.cluster import find_link
from tunebench.training.memory.budget import size_bytes
from tunebench.training.schedules import (
    Interconnect,
    LinearTransfer,
    PipelineCosts,
    StageCosts,
    link_transfer,
)
from tunebench.training.steps.time_range import End

__all__ = ["GivenStages", "read_stages", "write_stages"]

_FIELDS = {field.name for field in fields(StageCosts)}
_SIZES = {name for name in _FIELDS if name.endswith("_bytes")}
MOST_PARTS = 10_000
"""Most parts of a model, and ranks."""

_LINKS = ("link", "network", "ranks_per_node")


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenStages:
    """Parts of a model with known costs, which are grouped into the stages of a schedule.

    Attributes:
        name: Name of the model, such as that of the file.
        ranks: Ranks of the pipeline.
        parts: Costs of the parts of the model in their order; neighbours become one stage.
        per_node: Ranks in each node.
        inside: Time of a transfer within a node, given its bytes.
        between: Time of a transfer between nodes.
    """

    name: str
    ranks: int
    parts: tuple[StageCosts, ...]
    per_node: int
    inside: Callable[[int], float] | None = None
    between: Callable[[int], float] | None = None

    def __post_init__(self) -> None:
        if self.ranks < 1 or not self.parts or len(self.parts) % self.ranks:
            raise InputError(
                f"{self.name}: {len(self.parts)} parts cannot be divided among {self.ranks} ranks: expected "
                "a multiple of the ranks"
            )

    @classmethod
    def uniform(cls, stage: StageCosts, ranks: int, **links: Any) -> GivenStages:
        """Return ranks with equal costs, each of two equal parts that send as much as the whole.

        Args:
            stage: Costs of each rank.
            ranks: Number of ranks.
            links: Links, as of `GivenStages`.
        """
        half = replace(
            stage,
            **{
                name: getattr(stage, name) / 2
                for name in (
                    "forward_us",
                    "input_gradient_us",
                    "weight_gradient_us",
                    "unshard_us",
                    "reduce_us",
                )
            },
            backward_us=None if stage.backward_us is None else stage.backward_us / 2,
            activation_bytes=stage.activation_bytes // 2,
            retained_bytes=None if stage.retained_bytes is None else stage.retained_bytes // 2,
            evict_bytes=None if stage.evict_bytes is None else stage.evict_bytes // 2,
            static_bytes=stage.static_bytes // 2,
            unsharded_bytes=stage.unsharded_bytes // 2,
        )
        return cls(
            name="given stages", ranks=ranks, parts=(half,) * (2 * ranks), **{"per_node": ranks, **links}
        )

    def costs(self, placement: Sequence[int], *, pairs: bool = False) -> PipelineCosts:
        """Return the costs of all stages of a schedule.

        Args:
            placement: Rank of each stage.
            pairs: Whether ranks that exchange activations share nodes.

        Raises:
            InputError: if the parts cannot be divided evenly among the stages.
        """
        parts_per_stage, remainder = divmod(len(self.parts), len(placement))
        if remainder or not parts_per_stage:
            raise InputError(
                f"{len(self.parts)} parts cannot be divided among {len(placement)} stages: give the costs of "
                f"a multiple of {len(placement)} parts"
            )
        stages = [
            _joined(self.parts[first : first + parts_per_stage])
            for first in range(0, len(self.parts), parts_per_stage)
        ]
        # The output of the last stage goes nowhere.
        stages[-1] = replace(stages[-1], send_bytes=0, send_us=None)
        return PipelineCosts(stages=tuple(stages), interconnect=self.interconnect(pairs=pairs))

    def interconnect(self, *, pairs: bool = False) -> Interconnect:
        """Return the links between ranks; without a given link, transfers take no time."""
        inside = self.inside or _instant
        return Interconnect.grouped(self.ranks, self.per_node, inside, self.between or inside, pairs=pairs)

    def at(self, end: End) -> GivenStages:
        """Return the same stages: given times have no interval."""
        return self

    def optimizer_us(self, placement: Sequence[int]) -> float:
        """Return 0: the costs do not include the optimizer."""
        return 0.0


def _instant(_: int) -> float:
    return 0.0


def _joined(parts: Sequence[StageCosts]) -> StageCosts:
    """Return the costs of a stage of several parts, which sends the output of the last part."""
    if len(parts) == 1:
        return parts[0]
    whole = any(part.backward_us is not None for part in parts)
    return StageCosts(
        forward_us=sum(part.forward_us for part in parts),
        input_gradient_us=sum(part.input_gradient_us for part in parts),
        weight_gradient_us=sum(part.weight_gradient_us for part in parts),
        backward_us=sum(part.full_backward_us for part in parts) if whole else None,
        activation_bytes=sum(part.activation_bytes for part in parts),
        retained_bytes=sum(part.retained for part in parts),
        send_bytes=parts[-1].send_bytes,
        send_us=parts[-1].send_us,
        evict_bytes=sum(part.evicted for part in parts),
        static_bytes=sum(part.static_bytes for part in parts),
        unshard_us=sum(part.unshard_us for part in parts),
        unsharded_bytes=sum(part.unsharded_bytes for part in parts),
        reduce_us=sum(part.reduce_us for part in parts),
    )


# -- files -------------------------------------------------------------------------------------------------


def read_stages(path: str | Path, ranks: int | None = None) -> GivenStages:
    """Read the costs of a model's parts from a TOML or JSON file.

    The list `stage` has a table for each part with the fields of `StageCosts`: times in microseconds, sizes
    in bytes or as text (``"1.5GB"``). `backward_us` alone is divided evenly between the two gradients. A
    table with `count = 8` is eight equal parts. The table `interconnect` may have `ranks_per_node`, `link`
    and `network`: texts as of `find_link`, or tables with the fields of `LinearTransfer` for measured links.

    Args:
        path: The file.
        ranks: Ranks of the pipeline; None for `ranks` of the file, else one for each part.

    Raises:
        InputError: if the file cannot be read, or a field is missing, unknown or no number.
    """
    data = read_table(path, "costs of stages ")
    _require_known(path, "file", data, ("ranks", "stage", "interconnect"))
    tables = data.get("stage")
    if (
        not isinstance(tables, list)
        or not tables
        or not all(isinstance(part_table, dict) for part_table in tables)
    ):
        raise InputError(f"{path}: expected a table [[stage]] for each part of the model, found none")
    parts: list[StageCosts] = []
    for index, part_table in enumerate(tables):
        table = dict(part_table)
        count = table.pop("count", 1)
        parts_left = MOST_PARTS - len(parts)
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= parts_left:
            raise InputError(
                f"{path}, stage {index}: expected a count of 1 to {parts_left} parts, found {count!r}"
            )
        parts += [_stage(f"{path}, stage {index}", table)] * count
    links = data.get("interconnect", {})
    if not isinstance(links, dict):
        raise InputError(f"{path}: interconnect must be a table, found {links!r}")
    _require_known(path, "interconnect", links, _LINKS)
    among = ranks if ranks is not None else data.get("ranks", len(parts))
    for name, value in (("ranks", among), ("ranks_per_node", links.get("ranks_per_node", 1))):
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_PARTS:
            raise InputError(f"{path}: {name} must be a number from 1 to {MOST_PARTS}, found {value!r}")
    with interpreting(str(path)):
        return GivenStages(
            name=Path(path).stem,
            ranks=among,
            parts=tuple(parts),
            per_node=links.get("ranks_per_node", among),
            **{
                name: _transfer(f"{path}, {key}", links[key])
                for name, key in (("inside", "link"), ("between", "network"))
                if key in links
            },
        )


def write_stages(costs: PipelineCosts, ranks: int, path: str | Path) -> None:
    """Write the costs of measured stages for `read_stages`, as JSON if the file ends with .json, else TOML.

    Args:
        costs: Costs of the stages, each of which becomes a part.
        ranks: Ranks of the pipeline.
        path: The file.

    Raises:
        InputError: if the file cannot be written, or nodes have different numbers of ranks.
    """
    tables = [_without_none(asdict(stage)) for stage in costs.stages]
    links = _link_tables(costs.interconnect) if costs.interconnect is not None else {}
    if Path(path).suffix == ".json":
        text = json.dumps({"ranks": ranks, "stage": tables, "interconnect": links}, indent=1)
    else:
        blocks = [f"ranks = {ranks}\n", *(_toml("[[stage]]", table) for table in tables)]
        text = "\n".join([*blocks, _toml("[interconnect]", links)])
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write costs of stages to {path}: {error.strerror or error}") from None


def _link_tables(interconnect: Interconnect) -> dict[str, Any]:
    """Return the table of links, of which only measured ones are written."""
    nodes = interconnect.nodes
    per_node = nodes.count(nodes[0])
    if any(nodes.count(node) != per_node for node in nodes):
        raise InputError(f"costs of stages cannot be written: nodes have different numbers of ranks: {nodes}")
    measured = {"link": interconnect.inside, "network": interconnect.between}
    return {"ranks_per_node": per_node} | {
        key: asdict(transfer) for key, transfer in measured.items() if isinstance(transfer, LinearTransfer)
    }


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if value is not None}


def _toml(header: str, table: Mapping[str, Any]) -> str:
    """Return a table of numbers, and of tables of numbers, as TOML."""

    def text(value: Any) -> str:
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{name} = {text(number)}" for name, number in value.items()) + "}"
        return repr(value)

    return "\n".join([header, *(f"{name} = {text(value)}" for name, value in table.items()), ""])


def _transfer(where: str, link: Any) -> Callable[[int], float]:
    """Return the time of transfers over a link of a file."""
    if not isinstance(link, dict):
        return link_transfer(find_link(str(link)))
    _require_known(where, "link", link, [field.name for field in fields(LinearTransfer)])
    with interpreting(where):
        return LinearTransfer(**link)


def _stage(where: str, table: Mapping[str, Any]) -> StageCosts:
    """Return the costs of one table."""
    _require_known(where, "stage", table, sorted(_FIELDS))
    stage_costs = {name: _number(f"{where}: {name}", name, value) for name, value in table.items()}
    if "forward_us" not in stage_costs:
        raise InputError(f"{where}: forward_us is missing: give the time of the forward pass in microseconds")
    gradients = {"input_gradient_us", "weight_gradient_us"} & stage_costs.keys()
    if not gradients and "backward_us" in stage_costs:
        half = stage_costs["backward_us"] / 2
        stage_costs |= {"input_gradient_us": half, "weight_gradient_us": half}
    elif len(gradients) != 2:
        raise InputError(
            f"{where}: give backward_us, or both input_gradient_us and weight_gradient_us, in microseconds"
        )
    return StageCosts(**stage_costs)


def _number(where: str, name: str, value: Any) -> Any:
    """Return a time as a number, and a size in bytes."""
    if name in _SIZES and isinstance(value, str):
        return size_bytes(value, where)
    if isinstance(value, bool) or not isinstance(value, int | float):
        expected = "bytes, or a size such as '1.5GB'" if name in _SIZES else "microseconds"
        raise InputError(f"{where} must be {expected}, found {value!r}")
    return int(value) if name in _SIZES else float(value)


def _require_known(
    where: str | Path, table_kind: str, table: Mapping[str, Any], valid_keys: Sequence[str]
) -> None:
    """Raise UnknownName for a key that is not known."""
    for name in table:
        if name not in valid_keys:
            raise UnknownName(f"key of {table_kind} in {where}", name, valid_keys)

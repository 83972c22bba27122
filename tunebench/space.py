"""Search spaces: parameters, constraints, and all valid configurations as columns."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunebench._dataframe import Tabular
from tunebench._lazy import np
from tunebench._notebook import SHOWN_ROWS, html_grid, html_table
from tunebench.errors import ConfigError, InputError, TunebenchError, VariantError, describe_error

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

__all__ = ["Config", "Constraint", "Parameter", "Space", "Table", "Value", "distinct_rows", "takes_config"]

Value = int | float | str
"""A value of a parameter."""

Constraint = Callable[..., Any]
"""A predicate over columns, row by row. Its argument names are parameters, or `workload` and `device`."""

_CONTEXT = ("workload", "device")

MOST_KEPT = 2**21
"""Most rows of incomplete configurations that a space keeps for its next enumeration."""


class Config(Mapping[str, Any]):
    """One configuration of a search space: immutable, hashable, in the order of the space's parameters."""

    __slots__ = ("_hash", "_values")

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = dict(values)
        self._hash = hash(tuple(self._values.items()))

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self._values == other._values

    def __str__(self) -> str:
        """Return `bm=64,bn=64,…`, which `Space.parse` parses."""
        return ",".join(f"{name}={value}" for name, value in self._values.items())

    def __repr__(self) -> str:
        return f"Config({self})"

    def __reduce__(self) -> tuple[type[Config], tuple[dict[str, Value]]]:
        return (Config, (self._values,))


@dataclass(frozen=True, slots=True)
class Parameter:
    """A tunable parameter of a variant.

    Attributes:
        name: A Python identifier; constraints use it as an argument name.
        values: Valid values in a meaningful order: adjacent values are neighbours in the search.
        about: One line that describes the parameter.
    """

    name: str
    values: tuple[Value, ...]
    about: str

    def __post_init__(self) -> None:
        if not self.name.isidentifier() or self.name in _CONTEXT:
            raise InputError(f"parameter name {self.name!r} must be an identifier other than {_CONTEXT}")
        if not self.values or len(set(self.values)) != len(self.values):
            raise InputError(
                f"parameter {self.name} needs at least one value and no duplicates, got {self.values}"
            )

    def column(self) -> Array:
        """Return the values as a NumPy array."""
        return np.array(self.values)


@dataclass(frozen=True)
class Table(Tabular):
    """Configurations as columns, so that models can process all of them at once.

    Rows are in lexicographic order of the parameters' values as declared.

    Attributes:
        space: Search space of the configurations.
        ordinals: One row per configuration, one column per parameter: the position in `Parameter.values`.
    """

    space: Space
    ordinals: Array

    def __len__(self) -> int:
        return len(self.ordinals)

    @functools.cached_property
    def columns(self) -> dict[str, Array]:
        """Values of each parameter, by name."""
        return {
            parameter.name: parameter.column()[self.ordinals[:, i]]
            for i, parameter in enumerate(self.space.parameters)
        }

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]

    def _columns(self) -> dict[str, Array]:
        return self.columns

    def _repr_html_(self) -> str:
        """Return the first rows for notebooks."""
        names = self.space.names
        rows = ([self.config(row)[name] for name in names] for row in range(min(SHOWN_ROWS, len(self))))
        return html_grid(*names, rows=rows, caption=f"{len(self)} configurations")

    def config(self, row: int) -> Config:
        """Return one row as a configuration."""
        return Config(
            {
                parameter.name: parameter.values[ordinal]
                for parameter, ordinal in zip(self.space.parameters, self.ordinals[row], strict=True)
            }
        )

    def take(self, rows: Array) -> Table:
        """Return a table of the given rows.

        Args:
            rows: Row indices or a mask; ascending, to keep the lexicographic order.
        """
        return Table(self.space, self.ordinals[rows])

    @functools.cached_property
    def _keys(self) -> Array:
        return self.space.keys(self.ordinals)

    def row(self, config: Mapping[str, Value]) -> int | None:
        """Return the row of a configuration.

        Args:
            config: Value of each parameter.

        Returns:
            The row index, or None if the table does not contain the configuration.
        """
        try:
            ordinals = np.array([self.space.ordinals(config)])
        except ConfigError:
            return None
        row = int(self.find(ordinals)[0])
        return row if row >= 0 else None

    def find(self, ordinals: Array) -> Array:
        """Return the row index of each configuration, or -1 if this table does not contain it.

        Args:
            ordinals: One row per configuration, one column per parameter (see `Table`).
        """
        keys = self.space.keys(ordinals)
        rows = np.minimum(np.searchsorted(self._keys, keys), len(self) - 1)
        matches: Array = np.where(self._keys[rows] == keys, rows, -1) if len(self) else np.full(len(keys), -1)
        return matches

    def rows_of(self, other: Table) -> Array:
        """Return the row index of each configuration of another table, or -1 where it is missing here.

        Args:
            other: Table with the same parameters; their values may differ.

        Raises:
            InputError: The other table has different parameters.
        """
        if other.space.names != self.space.names:
            names = (", ".join(space.names) for space in (other.space, self.space))
            raise InputError(
                f"tables must have the same parameters, in the same order: {' and '.join(names)}"
            )
        present = np.ones(len(other), dtype=bool)
        ordinals = np.empty_like(other.ordinals)
        for i, (mine, theirs) in enumerate(zip(self.space.parameters, other.space.parameters, strict=True)):
            ordinal_of = {value: position for position, value in enumerate(mine.values)}
            ordinals[:, i] = np.array([ordinal_of.get(value, -1) for value in theirs.values])[
                other.ordinals[:, i]
            ]
            present &= ordinals[:, i] >= 0
        matches: Array = np.where(present, self.find(ordinals), -1)
        return matches


@dataclass(frozen=True)
class Space:
    """The search space of a variant: its parameters and the constraints between them.

    Attributes:
        parameters: The tunable parameters, outermost first.
        constraints: Predicates over columns (see `Constraint`); a configuration is valid if all of them are
            true.
    """

    parameters: tuple[Parameter, ...]
    constraints: tuple[Constraint, ...] = ()

    def __post_init__(self) -> None:
        names = self.names
        if len(set(names)) != len(names):
            raise InputError(f"parameter names of a space must be unique, got {', '.join(names)}")
        for constraint in self.constraints:
            unknown = set(_arguments(constraint)) - set(names) - set(_CONTEXT)
            if unknown:
                raise InputError(
                    f"constraint {_describe(constraint)} has unknown arguments {sorted(unknown)}; "
                    f"valid: {', '.join((*names, *_CONTEXT))}"
                )
        if self.size >= 2**63:
            raise InputError(
                f"a space must have fewer than 2**63 points before its constraints, got {self.size}"
            )

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        rows = ((parameter.name, ", ".join(map(str, parameter.values))) for parameter in self.parameters)
        return html_table(f"{self.size} points before {len(self.constraints)} constraints", rows)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters, in order."""
        return tuple(parameter.name for parameter in self.parameters)

    @functools.cached_property
    def size(self) -> int:
        """Number of points before constraints."""
        return functools.reduce(lambda a, b: a * b, (len(p.values) for p in self.parameters), 1)

    def enumerate(self, **context: Any) -> Table:
        """Return every valid configuration.

        Parameters are added one by one. Each constraint is applied as soon as all of its arguments are
        available, so that invalid branches are not expanded. It is evaluated once for equal arguments, and
        workloads for which the same constraints hold get the same table.

        Args:
            context: `workload` and `device`, for the constraints that use them.

        Returns:
            The valid configurations, in lexicographic order; their columns are read-only.
        """
        branch = self._root
        for parameter, ready in zip(self.parameters, self._ready, strict=True):
            branch = branch.expanded(len(parameter.values))
            for constraint, columns in ready:
                rows, group = branch.distinct(columns, self._counts)
                holds = self._holds(constraint, branch.candidates(rows), context)
                branch = branch.where(holds, group)
        if self._root.kept[0] > MOST_KEPT:
            self.__dict__.pop("_root", None)  # another thread may have removed it
        return branch.table(self)

    @functools.cached_property
    def _root(self) -> _Branch:
        """Configurations of no parameters: the first of the branches that calls of `enumerate` share."""
        return _Branch(np.zeros((1, 0), dtype=np.int16), [0])

    @functools.cached_property
    def _counts(self) -> tuple[int, ...]:
        return tuple(len(parameter.values) for parameter in self.parameters)

    @functools.cached_property
    def _ready(self) -> tuple[tuple[tuple[Constraint, tuple[int, ...]], ...], ...]:
        """For each parameter, the constraints to apply once it is added, and the columns they read."""
        column_of = {name: column for column, name in enumerate(self.names)}
        ready: list[list[tuple[Constraint, tuple[int, ...]]]] = [[] for _ in self.parameters]
        for constraint in self.constraints:
            columns = tuple(column_of[name] for name in _arguments(constraint) if name not in _CONTEXT)
            ready[max(columns, default=0)].append((constraint, columns))
        return tuple(map(tuple, ready))

    def __reduce__(self) -> tuple[type[Space], tuple[Any, ...]]:
        return Space, (self.parameters, self.constraints)

    def check(self, config: Mapping[str, Value], **context: Any) -> Config:
        """Return `config` in canonical order if it is valid.

        Args:
            config: Value of each parameter.
            context: `workload` and `device`, for the constraints that use them.

        Raises:
            ConfigError: A parameter or constraint fails; the message names it.
        """
        ordinals = np.array([self.ordinals(config)], dtype=np.int16)
        for constraint in self.constraints:
            if not self._holds(constraint, ordinals, context)[0]:
                raise ConfigError(f"{Config(config)} violates: {_describe(constraint)}")
        return Table(self, ordinals).config(0)

    def first_valid(self, configs: Iterable[Mapping[str, Value]], **context: Any) -> Config:
        """Return the first valid configuration of a sequence.

        Args:
            configs: Configurations in order of preference.
            context: `workload` and `device`, for the constraints that use them.

        Raises:
            ConfigError: No configuration is valid.
        """
        for config in configs:
            try:
                return self.check(config, **context)
            except ConfigError:
                continue
        on = ", ".join(getattr(argument, "name", str(argument)) for argument in context.values())
        raise ConfigError(f"no default configuration is valid for {on}")

    def parse(self, text: str) -> Config:
        """Parse the text form of a configuration; constraints are not checked.

        Args:
            text: ``name=value`` items, joined by commas.

        Raises:
            ConfigError: The text is malformed or incomplete, or contains an unknown value.
        """
        values: dict[str, Value] = {}
        by_name = {parameter.name: parameter for parameter in self.parameters}
        for item in filter(None, text.split(",")):
            name, _, value = item.partition("=")
            parameter = by_name.get(name)
            match = [v for v in parameter.values if str(v) == value] if parameter else []
            if not match:
                raise ConfigError(f"{item!r} is not valid; expected {self.describe()}")
            values[name] = match[0]
        return Table(self, np.array([self.ordinals(values)])).config(0)

    def describe(self) -> str:
        """Return the parameters and their values as one line of text."""
        return "; ".join(f"{p.name}={'|'.join(map(str, p.values))}" for p in self.parameters)

    def ordinals(self, config: Mapping[str, Value]) -> tuple[int, ...]:
        """Return the position of each value in its parameter's values.

        Args:
            config: Value of each parameter.

        Raises:
            ConfigError: A parameter is missing or unknown, or has an invalid value.
        """
        if set(config) != set(self.names):
            raise ConfigError(f"{Config(config)} must set exactly: {', '.join(self.names)}")
        try:
            return tuple(parameter.values.index(config[parameter.name]) for parameter in self.parameters)
        except ValueError:
            raise ConfigError(f"{Config(config)} is not valid; expected {self.describe()}") from None

    def keys(self, ordinals: Array) -> Array:
        """Return one integer per row of ordinals: equal rows have equal keys, and keys sort as rows do.

        Args:
            ordinals: One row per configuration, one column per parameter (see `Table`).
        """
        keys = np.zeros(len(ordinals), dtype=np.int64)
        for i, parameter in enumerate(self.parameters):
            keys = keys * len(parameter.values) + ordinals[:, i]
        return keys

    def _holds(self, constraint: Constraint, ordinals: Array, context: Mapping[str, Any]) -> Array:
        arguments = {}
        for name in _arguments(constraint):
            if name in _CONTEXT:
                arguments[name] = context[name]
            else:
                i = self.names.index(name)
                arguments[name] = self.parameters[i].column()[ordinals[:, i]]
        try:
            holds = np.asarray(constraint(**arguments))
            if holds.dtype.kind not in "biuf":
                raise TypeError(f"got {holds.dtype}")
            return np.broadcast_to(holds.astype(bool, copy=False), len(ordinals))
        except TunebenchError:
            raise
        except (Exception, SystemExit) as error:
            raise VariantError(
                f"constraint {_describe(constraint)} must return a column of booleans: "
                f"{describe_error(error)}; combine columns by & and |, without `and`, `or` and loops"
            ) from error

    def restrict(self, **values: tuple[Value, ...]) -> Space:
        """Return this space with fewer values for some parameters.

        Args:
            values: The remaining values of each restricted parameter, by name.
        """
        return dataclasses.replace(
            self,
            parameters=tuple(
                dataclasses.replace(p, values=values[p.name]) if p.name in values else p
                for p in self.parameters
            ),
        )


class _Branch:
    """Valid configurations of the first parameters, and the next branch for each outcome of a constraint.

    Configurations with a new parameter are not written before its first constraint, which often leaves few.

    Args:
        prefixes: Configurations without their last parameter: a row each, with a column per parameter (see
            `Table`).
        kept: Number of rows that this branch and all others of its space keep, shared by them.
        count: Number of values of the last parameter, all of which follow each prefix. None if the rows are
            whole configurations.
    """

    __slots__ = ("_count", "_distinct", "_next", "_prefixes", "_table", "kept")

    def __init__(self, prefixes: Array, kept: list[int], count: int | None = None) -> None:
        self._prefixes, self._count, self.kept = prefixes, count, kept
        prefixes.flags.writeable = False
        kept[0] += len(prefixes)
        self._next: dict[bytes, _Branch] = {}
        self._distinct: tuple[Any, Any] | None = None
        self._table: Table | None = None

    def expanded(self, count: int) -> _Branch:
        """Return the branch with one more parameter, which has the given number of values."""
        if b"" not in self._next:
            self._next[b""] = _Branch(self._rows(), self.kept, count)
        return self._next[b""]

    def distinct(self, columns: Sequence[int], counts: Sequence[int]) -> tuple[Any, Any]:
        """Return a prefix for each distinct combination of parameters, and the combination of each prefix.

        The last parameter does not count if prefixes lack it: every value of it follows each prefix.

        Args:
            columns: Columns of the parameters.
            counts: Number of values of all parameters.

        Returns:
            Two indices; both are `slice(None)` if there are about as many combinations as prefixes.
        """
        if self._distinct is None:
            self._distinct = (slice(None), slice(None))
            columns = [column for column in columns if column < self._prefixes.shape[1]]
            if math.prod(counts[column] for column in columns) < len(self._prefixes):
                self._distinct = distinct_rows(self._prefixes, columns, counts)
        return self._distinct

    def candidates(self, rows: Any) -> Array:
        """Return the configurations that begin with some prefixes."""
        return _expanded(self._prefixes[rows], self._count)

    def where(self, holds: Array, group: Any) -> _Branch:
        """Return the branch of the rows for whose combination of arguments a constraint holds."""
        key = holds.tobytes()
        if key not in self._next:
            self._next[key] = _Branch(self._rows() if holds.all() else self._valid(holds, group), self.kept)
        return self._next[key]

    def _valid(self, holds: Array, group: Any) -> Array:
        if self._count is None:
            return _rows_of(self._prefixes, np.flatnonzero(holds[group]))
        rows, values = np.nonzero(holds.reshape(-1, self._count)[group])
        return _with_column(self._prefixes, rows, values)

    def _rows(self) -> Array:
        """Return all configurations."""
        return _expanded(self._prefixes, self._count)

    def table(self, space: Space) -> Table:
        """Return the configurations as a table."""
        if self._table is None:
            ordinals = self._rows()
            ordinals.flags.writeable = False
            self._table = Table(space, ordinals)
        return self._table


def distinct_rows(ordinals: Array, columns: Sequence[int], counts: Sequence[int]) -> tuple[Array, Array]:
    """Return the first row of each distinct combination of some columns, and the combination of each row.

    Args:
        ordinals: One row per configuration, one column per parameter (see `Table`).
        columns: Columns of the parameters.
        counts: Number of values of all parameters.

    Returns:
        Indices of rows, in lexicographic order of the combinations; for each row, its index into these.
    """
    combinations = math.prod(counts[column] for column in columns)
    # A number in a mixed radix: rows have equal keys if and only if these columns are equal.
    keys = np.zeros(len(ordinals), dtype=np.int32 if combinations < 2**31 else np.int64)
    for column in columns:
        keys = keys * counts[column] + ordinals[:, column]
    if combinations >= len(ordinals):
        _, rows, number = np.unique(keys, return_index=True, return_inverse=True)
        return rows, number
    # A table of all keys needs no sorting. The first row of each key is written last.
    row_of = np.full(combinations, -1)
    row_of[keys[::-1]] = np.arange(len(keys))[::-1]
    number = np.cumsum(row_of >= 0, dtype=np.int32) - 1
    return row_of[row_of >= 0], number[keys]


def _expanded(prefixes: Array, count: int | None) -> Array:
    """Return each prefix followed by each number below a count; the prefixes if there is no count."""
    if count is None:
        return prefixes
    rows = np.repeat(np.arange(len(prefixes)), count)
    return _with_column(prefixes, rows, np.tile(np.arange(count), len(prefixes)))


def _rows_of(ordinals: Array, rows: Array, more: int = 0) -> Array:
    """Return some rows, stored column by column as constraints read them, with room for more columns."""
    selected = np.empty((len(rows), ordinals.shape[1] + more), dtype=np.int16, order="F")
    for column in range(ordinals.shape[1]):
        # The rows are in range; without `mode`, NumPy would write into a copy of `out` first.
        np.take(ordinals[:, column], rows, out=selected[:, column], mode="clip")
    return selected


def _with_column(prefixes: Array, rows: Array, values: Array) -> Array:
    """Return some prefixes with a value of one more parameter for each."""
    wider = _rows_of(prefixes, rows, more=1)
    wider[:, -1] = values
    return wider


def takes_config(*names: str) -> Callable[[Callable[..., Any]], Constraint]:
    """Return a decorator for a constraint that reads many parameters, as a mapping in its first argument.

    ``@takes_config("bm", "bn")`` on ``fits(config, device)`` is a constraint on `bm`, `bn` and `device`.

    Args:
        names: Parameters that the constraint reads from the mapping.
    """

    def decorate(holds: Callable[..., Any]) -> Constraint:
        @functools.wraps(holds)
        def constraint(**arguments: Any) -> Any:
            return holds({name: arguments.pop(name) for name in names}, **arguments)

        columns = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        context = list(inspect.signature(holds).parameters.values())[1:]
        constraint.__signature__ = inspect.Signature([*columns, *context])  # type: ignore[attr-defined]
        return constraint

    return decorate


@functools.cache
def _arguments(constraint: Constraint) -> tuple[str, ...]:
    return tuple(inspect.signature(constraint).parameters)


def _describe(constraint: Constraint) -> str:
    if constraint.__name__ != "<lambda>":
        return (constraint.__doc__ or constraint.__name__).strip().splitlines()[0]
    try:
        return inspect.getsource(constraint).strip().rstrip(",")
    except (OSError, TypeError):
        return f"a constraint on {', '.join(_arguments(constraint))}"

"""Rows that convert to a table of pandas or Arrow, which are optional (the extra `dataframe`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

__all__ = ["Tabular", "columns_of"]

EXTRA = "dataframe"


class Tabular(ABC):
    """Base of the classes whose rows convert to a table of pandas or Arrow."""

    __slots__ = ()

    @abstractmethod
    def _columns(self) -> Mapping[str, Iterable[Any]]:
        """Return the values of each column, by name; all columns have the same length."""

    def to_columns(self) -> dict[str, list[Any]]:
        """Return the values of each column, by name, without pandas or Arrow."""
        return {name: list(values) for name, values in self._columns().items()}

    def to_pandas(self) -> pd.DataFrame:
        """Return the rows as a DataFrame of pandas.

        Raises:
            MissingDependency: if pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise _missing("pandas") from error
        return pd.DataFrame(self.to_columns())

    def to_arrow(self) -> pa.Table:
        """Return the rows as a table of Arrow; values of different types in a column become text.

        Raises:
            MissingDependency: if pyarrow is not installed.
        """
        try:
            import pyarrow as pa
        except ImportError as error:
            raise _missing("pyarrow") from error
        return pa.table({name: _alike(values) for name, values in self.to_columns().items()})


def columns_of(rows: Iterable[Mapping[str, object]]) -> dict[str, list[object]]:
    """Return rows as columns; a row without a value has None.

    Args:
        rows: The rows; the columns have the order in which their names first occur.
    """
    listed = list(rows)
    names = dict.fromkeys(name for row in listed for name in row)
    return {name: [row.get(name) for row in listed] for name in names}


def _alike(values: Sequence[Any]) -> list[Any]:
    """Return values that Arrow accepts as one column."""
    plain = [value.item() if hasattr(value, "item") else value for value in values]
    kinds = {type(value) for value in plain if value is not None}
    if len(kinds) < 2 or kinds == {int, float}:
        return plain
    return [None if value is None else str(value) for value in plain]


def _missing(package: str) -> Exception:
    from tunebench.errors import MissingDependency  # lookups import as little as possible

    return MissingDependency(package, EXTRA)

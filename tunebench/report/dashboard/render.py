"""Templates, and how they show values. Every text is escaped: a database may come from anyone."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from tunebench._console import printable
from tunebench._figure import duration, ratio, significant
from tunebench._version import __version__
from tunebench.outcome import first_error
from tunebench.report.unit import ColumnUnit, unit_of

if TYPE_CHECKING:  # importing a module needs no extra
    import jinja2
    from markupsafe import Markup

__all__ = ["prepare_templates", "render", "template_environment"]

_AGES = (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1))


def render(template: str, **values: Any) -> str:
    """Return a page.

    Args:
        template: Name of the template.
        values: What the template shows.
    """
    return template_environment().get_template(template).render(active=template, **values)


def prepare_templates() -> None:
    """Compile all templates, so that the first page is as fast as later ones."""
    environment = template_environment()
    for name in environment.list_templates(extensions=("html",)):
        environment.get_template(name)


@functools.cache
def template_environment() -> jinja2.Environment:
    """Return the environment of the pages' templates, which escapes all values."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("tunebench.report.dashboard"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "us": _us,
        "unit": _unit,
        "first_error": first_error,
        "ratio": _ratio,
        "share": lambda value: "" if value is None else f"{value:.0%}",
        "count": lambda value: f"{value:,}",
        "figure": lambda value: significant(value) if isinstance(value, float) else value,
        "span": _span,
        "ago": _ago,
        "href": _href,
    }
    environment.globals["version"] = __version__
    return environment


def _finalize(value: Any) -> Any:
    """Return a value for a page: nothing for None, and control characters of texts escaped."""
    from markupsafe import Markup

    if value is None:
        return ""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _us(value: float | None, unit: ColumnUnit | None = None) -> str:
    """Return a time from microseconds, with a readable unit, or in the unit of a column; empty for None."""
    if value is None:
        return ""
    return duration(value).replace(" us", " µs") if unit is None else unit.text(value)


def _unit(times_us: Iterable[float | None]) -> ColumnUnit:
    """Return the unit of a column of times in microseconds."""
    unit = unit_of(times_us)
    return replace(unit, name="µs") if unit.name == "us" else unit


def _ratio(value: float | None) -> str:
    """Return a ratio with about three digits; empty for None."""
    return "" if value is None else f"{ratio(value)}x"


def _span(seconds: float | None) -> str:
    """Return a duration of seconds to hours; empty for None."""
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _ago(moment: datetime | None) -> Markup:
    """Return the age of a moment, with the moment itself as a hint; empty for None."""
    from markupsafe import Markup

    if moment is None:
        return Markup("")
    seconds = max(0.0, (datetime.now(UTC) - moment).total_seconds())
    text = "just now"
    for unit, size in _AGES:
        number = int(seconds // size)
        if number and seconds >= 2:
            text = f"{number} {unit}{'s' if number > 1 else ''} ago"
            break
    exact = moment.astimezone(UTC)
    return Markup('<time datetime="{}" title="{} UTC">{}</time>').format(
        exact.isoformat(timespec="seconds"), exact.strftime("%Y-%m-%d %H:%M:%S"), text
    )


def _href(path: str, **values: Any) -> str:
    """Return a URL with a query; names without a value are left out."""
    parameters = {name: value for name, value in values.items() if value not in ("", None)}
    return f"{path}?{urlencode(parameters)}" if parameters else path

"""A local web application that shows a database: `tunebench dashboard`.

`server` runs the application in `app`, whose pages are in `page`. `catalogue` reads what the database
contains in the background. `listing` sorts, filters and divides lists. `search_state`, `prediction` and
`plan_file` are what single pages show, `chart` draws, `render` fills in the templates, and `guard` refuses
requests of others.
"""

from __future__ import annotations

from tunebench.report.dashboard.server import Dashboard, serve

__all__ = ["Dashboard", "serve"]

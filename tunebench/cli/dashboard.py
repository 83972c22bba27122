"""`tunebench dashboard`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tunebench.cli._option import ReadDatabase, VariantFiles
from tunebench.cli._output import console

__all__ = ["command"]


def command(
    variant_file: VariantFiles = None,
    db: ReadDatabase = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for a free one.")] = 8642,
    plans: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder of plans, as `plan cluster --out` writes them.", show_default=False
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Host name that is answered, besides addresses and the name of this machine; repeatable.",
            show_default=False,
        ),
    ] = None,
    open_browser: Annotated[
        bool, typer.Option("--open", help="Open the dashboard in the default web browser.")
    ] = False,
) -> None:
    """Browse the database in a web browser: coverage, workloads, trials, searches that run, predictions.

    Only this machine can reach the pages unless --host says otherwise. The database is opened for reading
    only, and nothing is loaded from elsewhere. Ctrl-C ends the command.
    """
    from tunebench.report.dashboard import Dashboard, serve

    dashboard = Dashboard(db=db, host=host, port=port, plans=plans, names=tuple(allow_host or ()))

    def on_ready(url: str) -> None:
        from tunebench.report.dashboard.guard import is_loopback

        if not is_loopback(host):
            console(stderr=True).print(
                f"warning: whoever can reach {host} can read the database: the dashboard has no password",
                soft_wrap=True,
            )
        console().print(f"dashboard: {url} (Ctrl-C ends it)", soft_wrap=True)
        if open_browser:
            import webbrowser

            webbrowser.open(url)

    serve(dashboard, on_ready)

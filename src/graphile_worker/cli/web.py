"""``graphile-worker web``: the dashboard."""

from __future__ import annotations

import asyncio
import logging
import os
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any

import click

from graphile_worker._base.logs import library_logger as logger
from graphile_worker.cli.flags import verb
from graphile_worker.errors import ConfigurationError, GraphileWorkerError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphile_worker.app import App
    from graphile_worker.cli.settings import Value
    from graphile_worker.web.auth import Access, Auth
    from graphile_worker.web.dashboard import Dashboard

TOKEN, USER = "GRAPHILE_WORKER_WEB_TOKEN", "GRAPHILE_WORKER_WEB_USER"
HOST, PORT = "127.0.0.1", 8900
_PERMISSIONS = ("view", "view_payload", "add", "retry", "cancel", "edit", "remove", "maintain")


@verb(
    "web",
    "web",
    "web shop.jobs:app --port 9000 --read-only",
    "web --demo",
    also=("prepared_statements",),
)
@click.argument("app_path", metavar="[MODULE:APP]", required=False)
@click.option("--host", default=HOST, metavar="HOST", help=f"Address to listen on [{HOST}].")
@click.option(
    "--port",
    default=PORT,
    metavar="PORT",
    type=click.IntRange(0, 65535),
    help=f"Port; 0 for a free one [{PORT}].",
)
@click.option("--demo", is_flag=True, help="Show an example, on a private PostgreSQL.")
@click.option("--read-only", is_flag=True, help="Refuse all changes.")
@click.option(
    "--permission",
    "permissions",
    metavar="NAME",
    multiple=True,
    type=click.Choice(_PERMISSIONS),
    help="What users may do [everything]. Repeat it for several: " + ", ".join(_PERMISSIONS) + ".",
)
@click.option("--allowed-host", "allowed_hosts", metavar="NAME", multiple=True, help="Name that users open.")
@click.option("--root-path", default="", metavar="PATH", help="Path at which a proxy serves the dashboard.")
@click.option("--proxy-header", metavar="NAME", help="Header with the user whom a proxy signed in.")
@click.option(
    "--trusted-proxy",
    "trusted",
    metavar="ADDRESS",
    multiple=True,
    help="Address or network of that proxy [127.0.0.1].",
)
@click.option("--other-schema", "schemas", metavar="NAME", multiple=True, help="Further schema to switch to.")
@click.option(
    "--query-timeout",
    default=3.0,
    metavar="SECONDS",
    type=click.FloatRange(0.1, 600),
    help="Limit of a query [3].",
)
def web(settings: dict[str, Value], *, app_path: str | None, demo: bool, **options: Any) -> None:
    """Serve the dashboard and the JSON API.

    The command prints a link that works once, for a browser on this machine. For other machines, pass --host,
    and let users sign in: with the token in GRAPHILE_WORKER_WEB_TOKEN, the name and password in
    GRAPHILE_WORKER_WEB_USER (name:password), or by a proxy (--proxy-header).

    MODULE:APP names an App: its settings, tasks and recurring tasks apply. The dashboard runs no jobs.
    """
    _check_extra()
    asyncio.run(_serve(settings, app_path, demo=demo, **options))


def _check_extra() -> None:
    from importlib.util import find_spec  # noqa: PLC0415

    if any(find_spec(name) is None for name in ("starlette", "jinja2", "uvicorn")):
        raise MissingExtraError("The dashboard needs extra packages: pip install 'graphile-worker[web]'")


async def _serve(
    settings: dict[str, Value],
    app_path: str | None,
    *,
    demo: bool,
    host: str,
    port: int,
    read_only: bool,
    permissions: Sequence[str],
    allowed_hosts: Sequence[str],
    root_path: str,
    proxy_header: str | None,
    trusted: Sequence[str],
    schemas: Sequence[str],
    query_timeout: float,
) -> None:
    from graphile_worker.web import server  # noqa: PLC0415
    from graphile_worker.web.auth import ALL, Access, OneTimeLinks, Permission  # noqa: PLC0415
    from graphile_worker.web.dashboard import Dashboard  # noqa: PLC0415

    allowed = frozenset(Permission(name) for name in permissions) | {Permission.VIEW} if permissions else ALL
    auth = _find_auth(allowed, proxy_header, trusted)
    server.check_exposed(host, auth)
    bound = server.bind(host, port)
    async with AsyncExitStack() as stack:
        stack.callback(bound.close)
        links = None
        if auth is None:

            def announce(token: str) -> None:
                click.echo(f"Another browser: {server.address_of(bound, root, token)}")

            auth = links = OneTimeLinks(Access(user="local", permissions=allowed), on_used=announce)
        root = "/" + root_path.strip("/") if root_path.strip("/") else ""
        app = await _open_demo(stack) if demo else _load_app(settings, app_path)
        dashboard = Dashboard(
            app,
            auth=auth,
            read_only=read_only,
            schemas=schemas,
            allowed_hosts=[*allowed_hosts, host, "localhost"],
            query_timeout=query_timeout,
        )
        stack.push_async_callback(app.close)
        stack.push_async_callback(dashboard.close)
        await _try_database(dashboard)
        click.echo(f"Dashboard: {server.address_of(bound, root, links.token if links else None)}")
        if links is not None:
            click.echo("The link works once. Stop with Ctrl-C.")
        await server.make_server(dashboard, root).serve(sockets=[bound])


def _find_auth(allowed: frozenset[Any], proxy_header: str | None, trusted: Sequence[str]) -> Auth | None:
    from graphile_worker.web.auth import Access, basic_auth, proxy_auth, token_auth  # noqa: PLC0415

    def access(user: str) -> Access:
        return Access(user=user, permissions=allowed)

    token, user = os.environ.get(TOKEN), os.environ.get(USER)
    if sum(one is not None for one in (token, user, proxy_header)) > 1:
        raise ConfigurationError(f"Use only one of {TOKEN}, {USER} and --proxy-header.")
    if trusted and proxy_header is None:
        raise ConfigurationError("--trusted-proxy needs --proxy-header.")
    if token is not None:
        return token_auth({token: access("token")})
    if user is not None:
        name, colon, password = user.partition(":")
        if not (name and colon and password):
            raise ConfigurationError(f"{USER} must be a name, a colon and a password.")
        return basic_auth({name: (password, access(name))})
    if proxy_header is not None:
        return proxy_auth(proxy_header, trusted=trusted or ["127.0.0.1", "::1"], access=access)
    return None


def _load_app(settings: dict[str, Value], app_path: str | None) -> App:
    from graphile_worker.app import App  # noqa: PLC0415
    from graphile_worker.cli.run_worker import connection_arguments, load  # noqa: PLC0415

    path = app_path or settings["app"].value
    if path is not None:
        source = load(settings, path)
        if isinstance(source, App):
            return source
    return App(**connection_arguments(settings))


async def _try_database(dashboard: Dashboard) -> None:
    """Log at once if the database cannot be used. The dashboard is served anyway, because that may change.

    Raises:
        ConfigurationError: No database is configured.
    """
    try:
        await dashboard.data.counts()
    except ConfigurationError:
        raise
    except GraphileWorkerError as error:
        logger.warning("The queue cannot be read yet: %s", error)


async def _open_demo(stack: AsyncExitStack) -> App:
    """Start a private server with an example queue, and a worker that is busy."""
    from graphile_worker.testing import running_server  # noqa: PLC0415
    from graphile_worker.web.demo import keep_busy, make_app, seed_queue  # noqa: PLC0415

    logging.getLogger("graphile_worker").setLevel(logging.CRITICAL)  # the jobs of the example fail on purpose
    click.echo("Starting a private PostgreSQL …")
    dsn = stack.enter_context(running_server())
    app, pace = make_app(dsn)
    await seed_queue(app, pace)
    busy = asyncio.create_task(keep_busy(app, pace))

    async def stop() -> None:
        busy.cancel()
        with suppress(asyncio.CancelledError):
            await busy

    stack.push_async_callback(stop)
    return app

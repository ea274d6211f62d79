"""The task hello: graphile-worker --tasks examples/tasks."""


async def hello(payload: dict[str, str] | None) -> None:
    """Print a greeting."""
    print(f"Hello, {(payload or {}).get('name', 'world')}", flush=True)

"""The task hello: graphile-worker --tasks examples/tasks."""


async def hello(payload: dict[str, str] | None) -> None:
    """Greet somebody."""
    print(f"Hello, {(payload or {}).get('name', 'whoever you are')}", flush=True)

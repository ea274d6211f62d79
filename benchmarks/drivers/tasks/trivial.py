"""The task of a worker that is only to start and end."""


async def trivial(_payload: object) -> None:
    """Nothing."""

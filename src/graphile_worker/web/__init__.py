"""The web dashboard and the JSON API. They need the extra ``graphile-worker[web]``.

`Dashboard` is an ASGI application: ``graphile-worker web`` serves it alone, and programs mount it. Its pages
and its API call the same functions: `QueueData` reads, `Operations` changes. Only these touch the database.

- `models` has the values that both return, `filters` the text with which people select jobs.
- `data` reads within limits of time; `operations` changes jobs, very many of them in the background.
- `auth` decides who a request is from and what they may do; `security` guards every response and every
  change.
- `api` has the JSON API, `pages` the pages, `broadcaster` the stream of changes, `server` the program.

A dashboard never runs jobs, and stands above `app`: only the command imports this package.
"""

from graphile_worker._base.lazy_names import lazy_names

__all__, __getattr__, __dir__ = lazy_names(__name__)  # listed in __init__.pyi

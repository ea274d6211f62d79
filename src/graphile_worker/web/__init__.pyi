# The public names, listed once: for type checkers, and for lazy_names, which imports each on first use.

from graphile_worker.web.auth import (
    Access as Access,
    Permission as Permission,
    basic_auth as basic_auth,
    proxy_auth as proxy_auth,
    token_auth as token_auth,
)
from graphile_worker.web.dashboard import Dashboard as Dashboard

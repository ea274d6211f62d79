"""The proxy of the chaos runs, for tests."""

from chaos.proxy import Proxy, proxied

__all__ = ["Proxy", "proxied"]

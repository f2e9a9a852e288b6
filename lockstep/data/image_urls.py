"""Images at URLs: fetched within limits of size and time, and from public addresses alone unless private ones are allowed.

    URL ──resolve──► addresses, all public? ──connect to one of them──► reply ──► content, or a redirect: the same again

The addresses that are connected to are those that were checked: a name that resolves to another one later gains nothing. Behind a
proxy (`https_proxy`) the name is checked if it resolves here; its connections are the proxy's to make.
"""

import http.client
import ipaddress
import socket
import time
import urllib.request
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from lockstep.data.images import MOST_BYTES, ImageError

IDLE_TIMEOUT_S = 20.0
"""Until a host must have accepted the connection, or sent more."""
TIMEOUT_S = 120.0
"""Until the content must be complete."""
_CHUNK_BYTES = 2**16


def fetched(url: str, *, allow_private: bool = False) -> bytes:
    """The content of a URL; ImageError if it cannot be had. A file that is too large is cut, one byte above the limit.

    allow_private: also from this machine and from networks that are not public.
    """
    end = time.monotonic() + TIMEOUT_S
    content = bytearray()
    try:
        with _opener(allow_private).open(url, timeout=IDLE_TIMEOUT_S) as reply:
            while len(content) <= MOST_BYTES and (chunk := reply.read1(_CHUNK_BYTES)):
                content += chunk
                if time.monotonic() > end:
                    raise TimeoutError(f"not complete after {TIMEOUT_S:g} s")
    except _PrivateAddress as error:
        raise ImageError(
            f"is not fetched: {url[:200]} ({error}, which is not a public address); download it, or set "
            "data.allow_private_image_urls=true if rows may have this machine read from its own network"
        ) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ImageError(f"cannot be fetched: {url[:200]} ({error})") from error
    return bytes(content[: MOST_BYTES + 1])


class _PrivateAddress(Exception):
    """Where a URL or its redirect leads. urllib would wrap an OSError."""


class _PublicHosts(urllib.request.HTTPSHandler):
    """HTTP and HTTPS to public addresses, one request at a time."""

    _asked = ""
    """The host of the request, which a proxy's replaces."""

    def http_request(self, request: urllib.request.Request) -> urllib.request.Request:
        self._asked = request.host
        return self.do_request_(request)

    https_request = http_request

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self._open(http.client.HTTPConnection, request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self._open(http.client.HTTPSConnection, request)

    def _open(self, kind: type[http.client.HTTPConnection], request: urllib.request.Request) -> Any:
        if request.host == self._asked:
            return self.do_open(_of_public_address(kind), request)
        asked = urlsplit(f"//{self._asked}")
        with suppress(socket.gaierror):  # names that the proxy alone knows
            _public_addresses(asked.hostname or "", asked.port)
        return self.do_open(kind, request)


def _opener(allow_private: bool) -> urllib.request.OpenerDirector:
    """An opener of HTTP and HTTPS; urllib's default one follows redirects to FTP, too."""
    handlers: list[urllib.request.BaseHandler] = [
        urllib.request.ProxyHandler(),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
    ]
    if allow_private:
        handlers += [urllib.request.HTTPHandler(), urllib.request.HTTPSHandler()]
    else:
        handlers.append(_PublicHosts())
    opener = urllib.request.OpenerDirector()
    for handler in handlers:
        opener.add_handler(handler)
    return opener


def _of_public_address(kind: type[http.client.HTTPConnection]) -> Any:
    def make(host: str, **options: Any) -> http.client.HTTPConnection:
        connection: Any = kind(host, **options)
        connection._create_connection = _connect  # the standard library's place for another one
        return connection

    return make


def _connect(host_and_port: tuple[str, int], *options: Any) -> socket.socket:
    """`socket.create_connection`, to a public address."""
    *others, last = _public_addresses(*host_and_port)
    for address in others:
        try:
            return socket.create_connection(address, *options)
        except OSError:
            continue
    return socket.create_connection(last, *options)


def _public_addresses(host: str, port: int | None) -> list[tuple[str, int]]:
    """Those of a host; `_PrivateAddress` if one of them is not public."""
    found: list[tuple[str, int]] = []
    for *_, (name, number, *_) in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        address: Any = ipaddress.ip_address(name)
        address = getattr(address, "ipv4_mapped", None) or address
        if not address.is_global or address.is_multicast:
            raise _PrivateAddress(host if host == name else f"{host} is {name}")
        found.append((str(name), int(number)))
    return found

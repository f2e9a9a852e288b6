"""Images at URLs: fetched within limits of size and time, and from public addresses alone unless private ones are allowed.

    URL ──resolve──► addresses, all public? ──connect to one of them──► reply ──► content, or a redirect: the same again

The addresses that are connected to are those that were checked: a name that resolves to another one later gains nothing. Behind a
proxy (`https_proxy`) the name is checked if it resolves here; its connections are the proxy's to make.
"""

import http.client
import ipaddress
import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any
from urllib.parse import urlsplit

from lockstep.data.images import MOST_BYTES, ImageError

IDLE_TIMEOUT_S = 20.0
"""Until a host must have accepted the connection, or sent more."""
TIMEOUT_S = 120.0
"""Until the content must be complete, redirects included."""
_CHUNK_BYTES = 2**16
_UNICAST = ipaddress.ip_network("2000::/3")
"""Of IPv6, what is assigned to hosts of the internet."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
"""Where a network without IPv4 reaches hosts of IPv4, by the last 32 bits."""
_PROTOCOLS = ipaddress.ip_network("192.0.0.0/24")
"""Partly public to Python before 3.11.9; a cloud has its metadata there."""


def fetched(url: str, *, allow_private: bool = False) -> bytes:
    """The content of a URL; ImageError if it cannot be had. A file that is too large is cut, one byte above the limit.

    allow_private: also from this machine and from networks that are not public.
    """
    hosts = _Hosts(allow_private)
    content = bytearray()
    try:
        with hosts.ended_after(TIMEOUT_S), _opener(hosts).open(url, timeout=IDLE_TIMEOUT_S) as reply:
            while len(content) <= MOST_BYTES and (chunk := reply.read1(_CHUNK_BYTES)):
                content += chunk
            hosts.check_time()
            if len(content) <= MOST_BYTES and reply.length:  # what is left of Content-Length
                raise http.client.IncompleteRead(b"", reply.length)
    except _PrivateAddress as error:
        raise ImageError(
            f"is not fetched: {url[:200]} ({error}, which is not a public address); download it, or set "
            "data.allow_private_image_urls=true if rows may have this machine read from its own network"
        ) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = f"not complete after {TIMEOUT_S:g} s" if hosts.are_late else error
        raise ImageError(f"cannot be fetched: {url[:200]} ({reason})") from error
    return bytes(content[: MOST_BYTES + 1])


class _PrivateAddress(Exception):
    """Where a URL or its redirect leads. urllib would wrap an OSError."""


class _Hosts(urllib.request.AbstractHTTPHandler):
    """HTTP and HTTPS to public addresses, or to all.

    are_late: the time for all connections is over.
    """

    def __init__(self, allow_private: bool) -> None:
        super().__init__()
        self.allow_private = allow_private
        self.are_late = False
        self._sockets: list[socket.socket] = []

    http_request = https_request = urllib.request.AbstractHTTPHandler.do_request_

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self._open(http.client.HTTPConnection, request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self._open(http.client.HTTPSConnection, request)

    @contextmanager
    def ended_after(self, timeout_s: float) -> Iterator[None]:
        """Inside, connections end when the time is over: the timeout of a socket is for each read, however little it brings."""
        timer = threading.Timer(timeout_s, self._end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            for connected in self._sockets:
                connected.close()

    def check_time(self) -> None:
        if self.are_late:
            raise TimeoutError

    def _end(self) -> None:
        self.are_late = True
        for connected in list(self._sockets):
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

    def _open(self, kind: type[http.client.HTTPConnection], request: urllib.request.Request) -> Any:
        asked = urllib.request.Request(request.full_url).host
        is_direct = request.host == asked  # else it is the host of a proxy
        if not self.allow_private and not is_direct:
            parts = urlsplit(f"//{asked}")
            with suppress(socket.gaierror):  # names that the proxy alone knows
                _public_addresses(parts.hostname or "", parts.port)
        connect = _connect_to_public if is_direct and not self.allow_private else socket.create_connection

        def connected(*args: Any) -> socket.socket:
            found = connect(*args)
            self._sockets.append(found.dup())  # TLS takes over the socket itself
            self.check_time()
            return found

        def make(host: str, **options: Any) -> http.client.HTTPConnection:
            connection: Any = kind(host, **options)
            connection._create_connection = connected  # the standard library's place for another one
            return connection

        made: Any = make
        return self.do_open(made, request)


class _Redirects(urllib.request.HTTPRedirectHandler):
    def http_error_302(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: http.client.HTTPMessage
    ) -> Any:
        fp.close()  # urllib would read all that comes with the redirect
        return super().http_error_302(req, fp, code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


def _opener(hosts: _Hosts) -> urllib.request.OpenerDirector:
    """An opener of HTTP and HTTPS; urllib's default one follows redirects to FTP, too."""
    handlers: list[urllib.request.BaseHandler] = [
        urllib.request.ProxyHandler(),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        _Redirects(),
        urllib.request.HTTPErrorProcessor(),
        hosts,
    ]
    opener = urllib.request.OpenerDirector()
    for handler in handlers:
        opener.add_handler(handler)
    return opener


def _connect_to_public(host_and_port: tuple[str, int], *options: Any) -> socket.socket:
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
        if not _is_public(ipaddress.ip_address(name)):
            raise _PrivateAddress(host if host == name else f"{host} is {name}")
        found.append((str(name), int(number)))
    return found


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address):
        nat64 = ipaddress.IPv4Address(address.packed[-4:]) if address in _NAT64 else None
        inner = address.ipv4_mapped or address.sixtofour or nat64
        if inner is not None:
            return _is_public(inner)
        if address not in _UNICAST:
            return False
    return address.is_global and not address.is_multicast and address not in _PROTOCOLS

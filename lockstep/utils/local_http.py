"""Addresses of HTTP servers: whether they are of this machine, and sockets that listen on them."""

import ipaddress
import re
import socket
from collections.abc import Sequence

HOST = re.compile(r"(\[[\da-f:.]+\]|[\da-z.-]+)(?::\d{1,5})?")
"""A Host header: name or address, and port."""


def names_loopback(hosts: Sequence[str]) -> bool:
    """Whether the Host header, as it was sent, is one and names this machine; Starlette replaces an invalid one by our address."""
    found = HOST.fullmatch(hosts[0].lower()) if len(hosts) == 1 else None
    return found is not None and is_loopback(found[1])


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """A socket at this address; ValueError if it is taken."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener

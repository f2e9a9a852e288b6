"""verl.utils.net_utils"""

import ipaddress
import socket


def is_ipv4(ip_str: str) -> bool:
    return _is_version(ip_str, 4)


def is_ipv6(ip_str: str) -> bool:
    return _is_version(ip_str, 6)


is_valid_ipv6_address = is_ipv6


def _is_version(address: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(address).version == version
    except ValueError:
        return False


def get_free_port(address: str = "127.0.0.1") -> tuple[int, socket.socket]:
    """A port that is free on this machine, and the socket that holds it until it is closed."""
    holder = socket.socket(socket.AF_INET6 if is_ipv6(address) else socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((address, 0))
    return int(holder.getsockname()[1]), holder

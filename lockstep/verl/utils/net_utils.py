"""verl.utils.net_utils"""

import ipaddress


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

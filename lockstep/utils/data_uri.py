"""Image files as text: `data:image/png;base64,…`."""

import base64

_MAGIC = {
    b"\x89PNG": "png",
    b"\xff\xd8\xff": "jpeg",
    b"GIF8": "gif",
    b"BM": "bmp",
    b"II*\0": "tiff",
    b"MM\0*": "tiff",
}
"""First bytes of a file, and its format."""


def as_data_uri(file: bytes) -> str:
    """The content of an image's file as text, as OpenAI's messages have it."""
    return f"data:image/{extension_of(file)};base64,{base64.b64encode(file).decode()}"


def extension_of(file: bytes) -> str:
    """png, jpeg, webp, …: by the first bytes."""
    if file[:4] == b"RIFF" and file[8:12] == b"WEBP":
        return "webp"
    return next((name for start, name in _MAGIC.items() if file.startswith(start)), "png")

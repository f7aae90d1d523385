"""The beginnings of pictures and sounds, as their formats prescribe them."""

from __future__ import annotations

import base64
import struct
import zlib


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def png(width: int, height: int) -> bytes:
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    crc = struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + crc + bytes(200)


def gif(width: int, height: int) -> bytes:
    return b"GIF89a" + struct.pack("<HH", width, height) + bytes(200)


def bmp(width: int, height: int) -> bytes:
    return b"BM" + bytes(12) + struct.pack("<Iii", 40, width, -height) + bytes(200)


def jpeg(width: int, height: int, before: int = 500, marker: int = 0xC2) -> bytes:
    """With so many bytes of EXIF and tables before its size."""
    app = b"\xff\xe1" + struct.pack(">H", before + 2) + bytes(before)
    tables = b"\xff\xdb" + struct.pack(">H", 67) + bytes(65)
    huffman = b"\xff\xc4" + struct.pack(">H", 30) + bytes(28)
    frame = bytes([0xFF, marker]) + struct.pack(">HBHHB", 17, 8, height, width, 3) + bytes(9)
    return b"\xff\xd8" + app + tables + huffman + b"\xff" + frame + bytes(200)


def wav(seconds: float, rate: int = 32_000) -> bytes:
    size = int(seconds * rate)
    fmt = struct.pack("<IHHIIHH", 16, 1, 1, rate // 2, rate, 2, 16)
    return b"RIFF" + bytes(4) + b"WAVEfmt " + fmt + b"data" + bytes(4) + bytes(size)

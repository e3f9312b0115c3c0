"""Numbers of bytes, as people read them."""

from __future__ import annotations


def with_unit(nbytes: int) -> str:
    """``"24.00 GiB"``, ``"1.50 KiB"``, ``"12 bytes"``: in the largest unit of which there is at least one."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**power:
            return f"{nbytes / 1024**power:.2f} {unit}"
    return f"{nbytes} bytes" if nbytes != 1 else "1 byte"

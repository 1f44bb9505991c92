"""Keeps the memory that an update frees for the next one.

glibc gives large freed blocks back to the kernel at once, and the next update pays for them again, page by page.
"""

from __future__ import annotations

import ctypes
import platform

from halfstep.config.choice import Choice

M_TRIM_THRESHOLD = -1
M_MMAP_MAX = -4
"""Parameters of mallopt(3)."""
NEVER_TRIM = 2**31 - 1


def keep_freed_memory(device: str) -> Choice[str]:
    """Ask glibc to keep freed memory, where the tensors are in its hands."""
    if device != "cpu":
        return Choice(value="default", reason=f"tensors on {device} are not glibc's")
    if platform.libc_ver()[0] != "glibc":
        return Choice(value="default", reason="only glibc gives large blocks back to the kernel at once")
    libc = ctypes.CDLL(None)
    kept = libc.mallopt(M_MMAP_MAX, 0) and libc.mallopt(M_TRIM_THRESHOLD, NEVER_TRIM)
    if not kept:
        return Choice(value="default", reason="mallopt refused")
    return Choice(value="keeps freed memory", reason="glibc would give each update's gradients back to the kernel")

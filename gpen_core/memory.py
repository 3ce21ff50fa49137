"""What the C library does with memory that was freed."""

from __future__ import annotations

import ctypes
import os
import sys

# Of glibc's malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
MOST = 2**31 - 1
PAD = 64 * 2**20


def keep_freed_memory() -> bool:
    """Have malloc keep what is freed for the next call of the network; whether it does now.

    glibc gives large blocks back to the system at once and takes others for the next layer, page by page: hundreds of
    thousands of page faults for a face, up to half of the time on a CPU. This is for the whole process and its whole
    life, and its memory stays near its peak, so only who owns the process should call it. Another C library is left as
    it is, and so is one that the user has given settings of its own (MALLOC_... in the environment).
    """
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wanted = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, MOST), (M_TOP_PAD, PAD))
    return all(mallopt(name, value) == 1 for name, value in wanted)

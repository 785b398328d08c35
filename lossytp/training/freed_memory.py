"""Keep freed memory in the process, so that large tensors do not fault their pages in again.

glibc's malloc gives blocks above 32 MiB back to the kernel as soon as they are freed, and each new one costs a page
fault for every 4 KiB. Logits, their softmax and its gradient are such blocks: pretraining over losses in both phases
spent a third of its time on page faults (`python -m tests.bench.pretraining`).
"""

import ctypes
import platform

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # in malloc.h
MOST = 2**31 - 1  # bytes at the heap's end before they go back to the kernel
PAD = 2**26  # bytes by which the heap grows at once


def keep_freed_memory() -> None:
    """Let glibc's malloc keep what is freed until the process ends. Other C libraries are left alone."""
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, MOST), (M_TOP_PAD, PAD)):
        mallopt(option, value)


def give_back_freed_memory() -> None:
    """Give back to the kernel what is free now, such as a dense model's memory after sharding."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)

"""The seconds since the operating system started this process."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil


def process_age() -> float:
    """Seconds since this process was started, to a hundredth of a second on Linux.

    psutil's ``create_time`` adds the boot time, which Linux states in whole seconds, and would be up to a second early.
    It is used on other systems.
    """
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # starttime: proc(5)
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return time.time() - psutil.Process().create_time()

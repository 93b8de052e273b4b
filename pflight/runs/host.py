"""The memory that is available on the machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from pflight.errors import ConfigurationError

_GROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def available_memory(device: torch.device) -> int:
    """Return an upper bound on the bytes that this process can still allocate on a device.

    On the CPU this is the minimum of the system's available memory, the limit of the control group
    and the rest of the process's own limit (``ulimit -v``).
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if sys.platform == "win32":
        return sys.maxsize
    import resource

    page = os.sysconf("SC_PAGE_SIZE")
    limits = [page * os.sysconf("SC_PHYS_PAGES")]
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            limits.append(1024 * int(line.split()[1]))
    limits += [int(line) for path in _GROUP_LIMITS for line in _lines(path) if line.isdigit()]
    own, _ = resource.getrlimit(resource.RLIMIT_AS)
    if own != resource.RLIM_INFINITY:
        taken = [page * int(line.split()[0]) for line in _lines("/proc/self/statm")]
        limits.append(own - sum(taken))
    return max(min(limits), 0)


def check_fits(device: torch.device, whose: str, parts: Mapping[str, int], instead: str) -> None:
    """Raise if something does not fit into the available memory of a device.

    Args:
        device: The device.
        whose: The user of the memory, for the message.
        parts: Needed bytes by part.
        instead: The suggested change, for the message.

    Raises:
        ConfigurationError: With all numbers.

    Example:
        >>> check_fits(torch.device("cpu"), "PFedLA", {"models": 54_200}, "take fewer")
    """
    total, left = sum(parts.values()), available_memory(device)
    if total > left:
        listed = ", ".join(f"{readable(size)} for {part}" for part, size in parts.items())
        raise ConfigurationError(
            f"{whose} needs {listed}, but only {readable(left)} of memory are available on "
            f"{device}: {instead}"
        )


def readable(size: float) -> str:
    """Return a number of bytes in decimal units.

    Example:
        >>> readable(999), readable(1.8e9)
        ('999 B', '1.8 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:  # only Linux has such files
        return []

"""Memory that is freed stays with the process."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")

SCRIPT = """
import ctypes, resource, sys, torch
import pflight, pflight.__main__

for option in (-1, -3):  # all that is freed goes back, as by default it may
    ctypes.CDLL(None).mallopt(option, 2**16)
told = "tell" in sys.argv and pflight.keep_freed_memory()
if "command" in sys.argv:
    sys.argv[1:] = ["fit", "--help"]
    try:
        pflight.__main__.main()
    except SystemExit:
        pass
for step in range(20):
    if step == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(2**20) for _ in range(24)]  # 4 MiB each
    del blocks
print(int(told), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*arguments: str, **environ: str) -> tuple[bool, int]:
    """Return whether the allocator was told, and the page faults of ten steps of 96 MiB."""
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=True,
    )
    told, count = process.stdout.split()[-2:]
    return bool(int(told)), int(count)


@pytest.mark.long
def test_blocks_of_each_step_come_from_what_the_step_before_freed() -> None:
    told, few = faults("tell")
    assert told
    assert few < 1000
    _, many = faults()
    assert many > 10_000


@pytest.mark.long
def test_the_command_keeps_what_is_freed() -> None:
    _, few = faults("command")
    assert few < 1000


@pytest.mark.long
def test_the_environment_has_the_last_word() -> None:
    told, _ = faults("tell", MALLOC_TRIM_THRESHOLD_="131072")
    assert not told

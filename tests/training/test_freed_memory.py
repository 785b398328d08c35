import platform
import subprocess
import sys

import pytest

from lossytp.training import engine as connected_processes
from lossytp.training.config import TrainConfig
from lossytp.training.engine import give_back_freed_memory, keep_freed_memory

FAULTS = """
import resource, sys, torch
from lossytp.training.engine import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(2**24)  # 64 MiB
before = faults()
for _ in range(20):
    torch.ones(2**24)
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these options")
def test_large_tensors_do_not_fault_their_pages_in_again() -> None:
    kept, returned = (
        int(subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, check=True).stdout)
        for how in ("kept", "returned")
    )
    assert kept < returned / 10


def test_runs_keep_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[bool] = []
    monkeypatch.setattr(connected_processes, "keep_freed_memory", lambda: called.append(True))
    config = TrainConfig()
    with connected_processes.connected_processes(config, config.layout(0, 1)):
        assert called


def test_other_c_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.libc_ver", lambda: ("", ""))
    monkeypatch.setattr("ctypes.CDLL", None)  # fails if it is called
    keep_freed_memory()
    give_back_freed_memory()


GIVEN_BACK = """
import re, torch
from lossytp.training.engine import give_back_freed_memory, keep_freed_memory
keep_freed_memory()
def resident():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024  # MiB
large = [torch.ones(2**22) for _ in range(16)]  # 16 MiB each
shard = torch.ones(2**22)
del large
before = resident()
give_back_freed_memory()
print(before - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these options")
def test_what_is_free_is_given_back() -> None:
    """Even below what is still in use."""
    done = subprocess.run([sys.executable, "-c", GIVEN_BACK], capture_output=True, check=True)
    assert int(done.stdout) > 200

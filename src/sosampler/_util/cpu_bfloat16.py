"""Whether this CPU is good at bfloat16: tried, not believed.

Flags of a processor are not enough. A virtual machine may show them and then stop the program at the first such
instruction, and some chips take bfloat16 but are slower in it than in float32. So a child process tries it.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

log = logging.getLogger("sosampler")

ASKED = "SOSAMPLER_CPU_BFLOAT16"  # "0" or "1" in the environment answers without a trial
_FLAGS = ("avx512_bf16", "amx_bf16")
_LEAST_GAIN = 1.3
_SECONDS = 120

# A convolution and a matrix product of the usual sizes; prints how many times faster than float32 the convolution is.
_TRIAL = """
import time, torch
torch.set_num_threads(1)
best = {}
with torch.inference_mode():
    for dtype in (torch.float32, torch.bfloat16):
        image = torch.ones(4, 128, 28, 28, dtype=dtype).to(memory_format=torch.channels_last)
        net = torch.nn.Sequential(torch.nn.Conv2d(128, 128, 3, padding=1), torch.nn.Conv2d(128, 256, 1))
        net = net.to(dtype).to(memory_format=torch.channels_last)
        table = torch.ones(64, 256, dtype=dtype)
        float((table @ table.T).sum())
        net(image)
        times = []
        for _ in range(5):
            begin = time.process_time()
            net(image)
            times.append(time.process_time() - begin)
        best[dtype] = min(times)
print(best[torch.float32] / best[torch.bfloat16])
"""


@cache
def cpu_is_good_at_bfloat16() -> bool:
    """Takes a few seconds once a process on chips that claim it, and nothing on others."""
    asked = os.environ.get(ASKED)
    if asked in ("0", "1"):
        return asked == "1"
    return (claimed_gain() or 0.0) >= _LEAST_GAIN


@cache
def bfloat16_ends_the_process() -> bool:
    """Whether the chip claims bfloat16 and then does not take it."""
    return claimed_gain() == 0.0


@cache
def claimed_gain() -> float | None:
    """How many times faster than float32 it is; 0 if it ends the process, None where no chip claims or nobody knows."""
    info = Path("/proc/cpuinfo")
    if not info.exists() or not any(flag in info.read_text(errors="replace") for flag in _FLAGS):
        return None
    try:
        trial = subprocess.run([sys.executable, "-c", _TRIAL], capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.info("bfloat16 on this CPU could not be tried (%s); float32 it is", type(error).__name__)
        return None
    if trial.returncode != 0:
        log.info("bfloat16 on this CPU ends the process (code %d); float32 it is", trial.returncode)
        return 0.0
    gain = float(trial.stdout.split()[-1])  # libraries may be asked to say more (ONEDNN_VERBOSE)
    log.info("bfloat16 on this CPU is %.2f times as fast as float32", gain)
    return gain

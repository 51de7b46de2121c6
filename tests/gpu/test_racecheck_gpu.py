"""racecheck as `launch/sanitize.py --for-racecheck` uses it: what is in order it calls clean, what is not it reports."""
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs the triton package")

from ringflash.launch.prove import find_sanitizer  # noqa: E402

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "sanitize.py"
REPORTED = 9

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"),
    pytest.mark.skipif(find_sanitizer() is None, reason="needs compute-sanitizer"),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize("probe, expected", [("ordered", 0), ("reader-early", REPORTED), ("writer-early", REPORTED)])
def test_racecheck_reports_races_and_nothing_else(probe, expected):
    done = subprocess.run(
        [find_sanitizer(), "--tool", "racecheck", "--error-exitcode", str(REPORTED), sys.executable, str(SCRIPT), "--probe", probe,
         "--for-racecheck"], capture_output=True, text=True, timeout=200)
    assert done.returncode == expected, done.stdout + done.stderr
    assert ("0 hazards displayed" in done.stdout) == (expected == 0)
    assert f"probe {probe}, as it should be" in done.stdout

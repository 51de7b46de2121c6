"""The README is true: its code runs as printed, the files and commands that it names exist."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.S)


def test_the_torchrun_example_runs_on_three_ranks(tmp_path):
    (script,) = [block for block in BLOCKS if "torchrun" in block]
    (tmp_path / "ring.py").write_text(script + "\nassert q.grad.isfinite().all() and q.grad.any(), out\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "ring.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_the_single_process_example_runs():
    (script,) = [block for block in BLOCKS if "simulate" in block]
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize("document", ["README.md", "DESIGN.md"])
def test_files_that_a_document_names_exist(document):
    text = (ROOT / document).read_text()
    paths = set(re.findall(r"(?:launch|kernels|ringflash|configs|docs|tests)/[\w/]+\.(?:py|sh|yaml|png|sbatch)", text))
    assert paths
    for path in paths:
        assert (ROOT / path).is_file(), path


def test_experiments_that_the_readme_starts_exist():
    names = set(re.findall(r"experiment=(\w+)", README))
    assert {"quickstart", "one_gpu", "eight_gpus"} <= names
    for name in names:
        assert (ROOT / "configs" / "experiment" / f"{name}.yaml").is_file(), name

"""The scripts for several nodes: the commands that they come to, and two "nodes" on this machine that train as one."""
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from test_train_launch import MINI, ROOT, composed_of, environment, rows

SCRIPTS = ("torchrun.sh", "train.sbatch")


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_scripts_are_bash_and_take_no_step_on_after_an_error(name):
    path = ROOT / "launch" / name
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True).stderr == ""
    assert "set -euo pipefail" in path.read_text() and path.read_text().startswith("#!/usr/bin/env bash\n")


def said(name: str, tmp_path: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess:
    """What the script would start, one word a line, with the commands of a cluster played by short ones."""
    tools = {"srun": 'printf "%s\\n" "$@"', "scontrol": 'printf "node7\\nnode8\\n"',
             "fakepython": 'printf "%s\\n" "$@"; echo "GLOO=${GLOO_SOCKET_IFNAME:-}" "NCCL=${NCCL_SOCKET_IFNAME:-}"'}
    for tool, text in tools.items():
        (tmp_path / tool).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / tool).chmod(0o755)
    plain = {k: v for k, v in os.environ.items() if k not in ("IFNAME", "NODES", "GPUS", "RESTARTS")}
    return subprocess.run(["bash", str(ROOT / "launch" / name), *arguments], capture_output=True, text=True, cwd=tmp_path,
                          env=plain | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": "fakepython"} | env)


def test_the_slurm_template_starts_torchrun_on_every_node_at_the_first_ones_address(tmp_path):
    done = said("train.sbatch", tmp_path, "experiment=eight_gpus", "run.dir=/shared/it's mine", SLURM_SUBMIT_DIR=str(ROOT),
                SLURM_JOB_NODELIST="node[7-8]", SLURM_NNODES="2", SLURM_GPUS_ON_NODE="8", SLURM_JOB_ID="42")
    assert done.stdout.splitlines() == [
        "--kill-on-bad-exit=1", "fakepython", "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "8",
        "--max-restarts", "2", "--rdzv-id", "42", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node7:29500", "launch/train.py", "experiment=eight_gpus",
        "run.dir=/shared/it's mine"], done.stderr


def test_the_plain_script_names_what_it_lacks_and_sets_one_interface_for_both_backends(tmp_path):
    lacking = said("torchrun.sh", tmp_path, "experiment=quickstart", NODES="2", HEAD="a:1")
    assert lacking.returncode != 0 and "JOB: a name that all nodes share" in lacking.stderr
    done = said("torchrun.sh", tmp_path, "train.steps=3", NODES="2", HEAD="a:1", JOB="it", IFNAME="eth1", GPUS="4", RESTARTS="3")
    words = done.stdout.split()
    assert words[:10] == ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "4", "--max-restarts", "3",
                          "--rdzv-id", "it"]
    assert words[-3:] == ["train.steps=3", "GLOO=eth1", "NCCL=eth1"]


def test_two_nodes_on_one_machine_train_as_one_run(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        head = f"127.0.0.1:{probe.getsockname()[1]}"
    env = environment(NODES="2", GPUS="1", HEAD=head, JOB="mine", IFNAME="lo", PYTHON=sys.executable)
    command = ["bash", str(ROOT / "launch" / "torchrun.sh"), *MINI, "train.steps=2", "optim.warmup_steps=0",
               f"run.dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}"]
    nodes = [subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
             for _ in range(2)]
    done = [node.communicate(timeout=110.0) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], done
    assert sum("2 ranks, run folder" in err for _, err in done) == 1 and sum("unigram entropy" in out for out, _ in done) == 1
    assert [row["step"] for row in rows(tmp_path / "run", "train")] == [1, 2]
    assert composed_of(tmp_path / "run").train.steps == 2

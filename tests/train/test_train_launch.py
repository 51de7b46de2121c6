"""launch/train.py as users start it: plainly, in a sweep, under a launcher of their own; and what is refused, and how."""
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from train_ranks import with_train

from ringflash.config import Config
from ringflash.launch.train import register_schema, to_config
from ringflash.train.loop import train
from ringflash.train.text import open_data
from ringflash.train.world import single

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = [sys.executable, str(ROOT / "launch" / "train.py")]
STEPS = 12
MINI = ["experiment=quickstart", "debug=fast", "model=tiny", "data.seq_len=129", "data.max_bytes=60000", "optim.warmup_steps=4",
        "train.accumulation=2", f"train.steps={STEPS}", "run.name=mini", "run.progress=false"]
PNG = b"\x89PNG\r\n\x1a\n"


def environment(**more: str) -> dict:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    return env | {"OMP_NUM_THREADS": "1"} | more


def launch(cwd: Path, *overrides: str, timeout: float = 100.0, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run([*SCRIPT, *overrides], cwd=cwd, env=environment(**env), capture_output=True, text=True, timeout=timeout)


def start_ranks(cwd: Path, arguments: list[list[str]], delay_s: float = 0.0) -> list[subprocess.Popen]:
    """The ranks as a launcher that is not torchrun starts them: one environment each, `delay_s` apart."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank, given in enumerate(arguments):
        env = environment(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(len(arguments)), MASTER_ADDR="127.0.0.1",
                          MASTER_PORT=str(port))
        ranks.append(subprocess.Popen([*SCRIPT, *given], cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                      text=True))
        time.sleep(delay_s)
    return ranks


def ended(ranks: list[subprocess.Popen]) -> list[subprocess.CompletedProcess]:
    done = []
    for process in ranks:
        out, err = process.communicate(timeout=100.0)
        done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return done


def own_launcher(cwd: Path, arguments: list[list[str]]) -> list[subprocess.CompletedProcess]:
    return ended(start_ranks(cwd, arguments))


def run_folders(cwd: Path) -> list[Path]:
    return [p for p in (cwd / "outputs").iterdir() if p.name != "cache"]


def rows(folder: Path, kind: str) -> list[dict]:
    return [row for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if row["kind"] == kind]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A 2-rank run started plainly: (folder of the launch, result)."""
    cwd = tmp_path_factory.mktemp("plain")
    return cwd, launch(cwd, *MINI)


def test_a_plain_start_trains_on_two_ranks_and_leaves_one_folder_with_everything(plain):
    cwd, done = plain
    assert done.returncode == 0, done.stderr
    (folder,) = run_folders(cwd)
    names = {p.name for p in folder.iterdir()}
    assert names == {".hydra", "metrics.jsonl", "summary.json", "loss.png", "loss_by_position.png", "speed.png", "weights.pt",
                     "checkpoints"}
    assert {p.name for p in (folder / ".hydra").iterdir()} == {"config.yaml", "overrides.yaml", "hydra.yaml"}
    assert {p.name for p in cwd.iterdir()} == {"outputs"}, "nothing is written beside the run folder"
    assert "unigram entropy" in done.stdout and "heldout loss" in done.stdout
    assert done.stdout.count("unigram entropy") == 1, "only rank 0 speaks"


def test_metrics_hold_a_row_for_each_step_and_the_png_is_one(plain):
    (folder,) = run_folders(plain[0])
    train_rows = rows(folder, "train")
    assert [row["step"] for row in train_rows] == list(range(1, STEPS + 1))
    assert set(train_rows[0]) == {"kind", "step", "loss", "lr", "grad_norm", "tokens", "valid_tokens", "tokens_per_s",
                                  "tokens_per_s_per_rank", "tflops_per_rank", "peak_memory_gib", "data_wait_ms", "pairs_imbalance",
                                  "pairs_imbalance_in_order", "time_s"}
    assert [row["tokens"] for row in train_rows] == [2 * 129 * (i + 1) for i in range(STEPS)]
    assert all(0 < row["valid_tokens"] < 2 * 129 and row["tokens_per_s"] > 0 for row in train_rows)
    (evaluated,) = rows(folder, "eval")
    assert evaluated["step"] == STEPS and evaluated["heldout_loss"] > 0
    assert json.loads((folder / "summary.json").read_text())["heldout_loss"] == evaluated["heldout_loss"]
    assert all((folder / f"{name}.png").read_bytes().startswith(PNG) for name in ("loss", "loss_by_position", "speed"))
    weights = torch.load(folder / "weights.pt")
    assert all(torch.isfinite(tensor).all() for tensor in weights.values()) and "embedding.weight" in weights


def test_two_ranks_give_the_loss_curve_of_one(plain, tmp_path):
    (folder,) = run_folders(plain[0])
    cfg = composed_of(folder)
    assert cfg.parallel.nproc == 2
    cfg.data.cache_dir = str(tmp_path)
    train(cfg, single(), open_data(cfg), tmp_path)
    ours, theirs = rows(tmp_path, "train"), rows(folder, "train")
    assert theirs[0]["loss"] == pytest.approx(ours[0]["loss"], abs=1e-5)
    assert [row["loss"] for row in theirs] == pytest.approx([row["loss"] for row in ours], abs=1e-3)
    assert [row["lr"] for row in theirs] == [row["lr"] for row in ours]
    assert [row["valid_tokens"] for row in theirs] == [row["valid_tokens"] for row in ours]
    assert rows(folder, "eval")[0]["heldout_loss"] == pytest.approx(rows(tmp_path, "eval")[0]["heldout_loss"], abs=1e-3)
    assert ours[-1]["loss"] < ours[0]["loss"] - 0.5


def composed_of(folder: Path) -> Config:
    from omegaconf import OmegaConf

    loaded = OmegaConf.load(folder / ".hydra" / "config.yaml")
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), loaded))


def test_ranks_of_another_launcher_started_seconds_apart_share_one_folder_and_stop_together(tmp_path):
    ranks = start_ranks(tmp_path, [[*MINI, "train.steps=100000"]] * 2, delay_s=2.0)
    deadline = time.monotonic() + 80.0
    while not any(f.stat().st_size for f in tmp_path.glob("outputs/mini-*/metrics.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.1)
    ranks[1].send_signal(signal.SIGTERM)
    done = ended(ranks)
    assert [rank.returncode for rank in done] == [0, 0], done[0].stderr + done[1].stderr
    (folder,) = run_folders(tmp_path)
    assert "train.steps=100000" in (folder / ".hydra" / "overrides.yaml").read_text()
    assert str(folder) in done[0].stderr and done[1].stdout == done[1].stderr == "", "only rank 0 speaks"
    # Told to one rank, learnt by both in the same step, which is saved.
    assert "stopped by SIGTERM, and saved" in done[0].stderr
    step = json.loads((folder / "stopped.json").read_text())["step"]
    assert (folder / "checkpoints" / f"step-{step:08d}" / "manifest.json").exists()


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Three jobs, of which the first is refused and the last diverges: (folder of the sweep, result)."""
    cwd = tmp_path_factory.mktemp("sweep")
    done = launch(cwd, *MINI, "train.steps=4", "optim=sgd", "optim.grad_clip=0", "optim.warmup_steps=0", "-m",
                  "optim.lr=-1,0.1,1e30", timeout=110.0)
    (folder,) = run_folders(cwd)
    return folder, done


def test_a_sweep_runs_each_job_in_its_own_folder_and_goes_on_after_one_that_is_refused(sweep):
    folder, done = sweep
    assert done.returncode == 1 and "optim.lr=-1.0: must be a finite number above 0" in done.stderr, done.stderr
    assert [composed_of(folder / job).optim.lr for job in ("1", "2")] == [0.1, 1e30] and not list((folder / "0").iterdir())
    results = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert [(row["job"], row["exit_code"]) for row in results] == [("0", 2), ("1", 0), ("2", 1)]
    (evaluated,) = rows(folder / "1", "eval")
    assert [row["heldout_loss"] for row in results] == [None, evaluated["heldout_loss"], None]
    told = [line.split() for line in done.stdout.splitlines() if " job " in line]
    assert told[0] == [f"{evaluated['heldout_loss']:.4f}", "job", "1", "optim.lr=0.1"]
    assert [line[0] for line in told[1:]] == ["failed"] * 2


def test_a_run_that_diverges_ends_all_ranks_with_one_message_and_keeps_its_figures(sweep):
    folder, done = sweep
    assert done.stderr.count("ringflash train: step 2: the loss is ") == 1
    assert [row["step"] for row in rows(folder / "2", "train")] == [1] and not (folder / "2" / "weights.pt").exists()
    assert "failed (exit code 1), see" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(("overrides", "said"), [
    (["model.dmodel=3"], "model.dmodel: no such key; nearest: model.dim"),
    (["experiment=quickstart", "parallel.cp=3"], "parallel.dp=1, parallel.cp=3: dp * cp must be the world size, 1 * 3 = 3 "
     "is not 2; nearest: parallel.dp=1 parallel.cp=2"),
    (["run.device=cpu", "attention.kernel=triton"], "attention.kernel='triton' is not available for"),
    (["run.device=cpu", "data=files", "data.path=no/such/text"], "data.path=no/such/text: no such file or folder"),
    (["run.device=cpu", "data.path=empty.txt"], "data.path=empty.txt: is empty"),
    (["run.device=cpu", "data.path=short.txt"], "data.seq_len=1024: must lie between 1 and the size of the text"),
])
def test_what_cannot_run_is_refused_by_the_parent_with_one_clear_message(tmp_path, overrides, said):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "short.txt").write_text("too short for a sequence\n")
    done = launch(tmp_path, *overrides, TRITON_INTERPRET="0")
    assert done.returncode in (1, 2) and done.stdout == ""
    assert f"ringflash train: {said}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not [p for p in tmp_path.glob("outputs/*") if p.name != "cache"], "no run folder for a run that cannot be"


def test_under_a_launcher_a_missing_file_ends_all_ranks_with_one_message(tmp_path):
    began = time.monotonic()
    done = own_launcher(tmp_path, [[*MINI, "data.path=no/such/text"]] * 2)
    assert [rank.returncode for rank in done] == [2, 2]
    assert done[0].stderr == "ringflash train: data.path=no/such/text: no such file or folder\n" and done[1].stderr == ""
    assert time.monotonic() - began < 60.0
    assert not (tmp_path / "outputs").exists()


def test_under_a_launcher_a_wrong_world_size_names_the_rule(tmp_path):
    (done,) = own_launcher(tmp_path, [[*MINI, "parallel.cp=2"]])
    assert done.returncode == 2
    rule = "parallel.dp=1, parallel.cp=2: dp * cp must be the world size, 1 * 2 = 2 is not 1"
    assert done.stderr.startswith(f"ringflash train: {rule}")


def test_a_sweep_under_a_launcher_is_refused_with_advice(tmp_path):
    (done,) = own_launcher(tmp_path, [[*MINI, "-m", "train.seed=0,1"]])
    assert done.returncode == 2
    assert "start the sweep plainly" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "outputs").exists()


def descendants(pid: int) -> list[int]:
    children = [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return children + [d for c in children for d in descendants(c)]


def a_long_run(cwd: Path, *overrides: str, steps: int = 1) -> tuple[subprocess.Popen, list[int]]:
    """A 2-rank run without end, once it has taken `steps` steps; and the pids of its ranks."""
    process = subprocess.Popen([*SCRIPT, *MINI, "train.steps=100000", *overrides], cwd=cwd, env=environment(), stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE, text=True)
    # Long: beside other tests that keep every core busy, three interpreters and torchrun may take a minute to start.
    deadline = time.monotonic() + 100.0
    while not any(f.read_bytes().count(b"\n") >= steps for f in cwd.glob("outputs/mini-*/metrics.jsonl")):
        if process.poll() is not None or time.monotonic() > deadline:
            process.terminate()
            pytest.fail(f"step {steps} was not taken; {process.communicate(timeout=30.0)[1]}")
        time.sleep(0.2)
    ranks = [pid for pid in descendants(process.pid)
             if b"--run-folder" in (line := Path(f"/proc/{pid}/cmdline").read_bytes()) and b"torch.distributed.run" not in line]
    return process, ranks


def test_a_killed_rank_ends_the_run_with_an_error_within_seconds(tmp_path):
    process, ranks = a_long_run(tmp_path)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    began = time.monotonic()
    _, err = process.communicate(timeout=60.0)
    assert process.returncode not in (0, None) and time.monotonic() - began < 40.0
    assert "ringflash train: failed (exit code" in err and "ChildFailedError" in err, "a crash is told in full"
    # The survivor fails in the ring itself, or says where the ring stood: pass, step, hop and peer.
    assert re.search(r"rank 0: .*cp rank [01] \(global rank [01]\), (forward|backward) call \d+, step \d+", err, flags=re.S), err
    assert re.search(r"(sending|receiving) d?kv of cp rank [01] (to|from) cp rank 1", err), err


@pytest.mark.parametrize("signum", (signal.SIGTERM, signal.SIGINT))
def test_a_signal_to_the_launcher_alone_reaches_the_ranks_which_say_where_they_stand(tmp_path, signum):
    process, ranks = a_long_run(tmp_path, "checkpoint.every=0")
    process.send_signal(signum)
    _, err = process.communicate(timeout=60.0)
    assert process.returncode not in (0, None)
    assert "stopped by SIGTERM; " in err and ("forward call" in err or "backward call" in err or "agreement call" in err), err
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)


def test_seeds_differ_and_repeat(tmp_path):
    from hydra import compose, initialize_config_module

    register_schema()
    with initialize_config_module("ringflash.configs", version_base="1.3"):
        cfg = to_config(compose("train", overrides=[*MINI, "train.steps=4", f"data.cache_dir={tmp_path}"]))
    first, again = (train(cfg, single(), open_data(cfg), None)["first_loss"] for _ in range(2))
    other = with_train(cfg, seed=5)
    assert first == again != train(other, single(), open_data(other), None)["first_loss"]

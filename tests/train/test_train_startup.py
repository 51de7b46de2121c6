"""What ranks settle before any process group exists, and the folder of a run. Threads stand for ranks."""
import threading
import time

import pytest
import torch.distributed as dist

from ringflash.train.folder import claim_run_folder, make_run_folder
from ringflash.train.startup import StartError, agree, check_launcher


def start(tmp_path, ranks: list[dict]) -> tuple[list, list[str], list]:
    """agree() on as many ranks as there are dicts of arguments -> (outcome of each, what rank 0 said, folders that were made)."""
    store_path = str(tmp_path / "store")
    spoken, made, outcomes = [], [], [None] * len(ranks)

    def make_folder():
        made.append(make_run_folder(tmp_path / "outputs", "run"))
        return made[-1]

    def one(rank: int, delay_s: float = 0.0, error=None, config=None):
        time.sleep(delay_s)
        try:
            store = dist.FileStore(store_path, len(ranks))
            outcomes[rank] = agree(store, rank, len(ranks), error=error, config=config or {"a": 1}, make_folder=make_folder,
                                   timeout_s=20.0, speak=spoken.append)
        except StartError as refused:
            outcomes[rank] = refused

    threads = [threading.Thread(target=one, args=(rank,), kwargs=given) for rank, given in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40.0)
    return outcomes, spoken, made


def test_ranks_that_start_apart_share_the_one_folder_that_rank_0_made(tmp_path):
    outcomes, spoken, made = start(tmp_path, [{}, {"delay_s": 1.5}, {"delay_s": 0.7}])
    assert len(made) == 1 and outcomes == [made[0].resolve()] * 3 and spoken == []


def test_rank_0_may_come_last(tmp_path):
    outcomes, _, made = start(tmp_path, [{"delay_s": 1.2}, {}])
    assert len(made) == 1 and outcomes == [made[0].resolve()] * 2


def test_an_error_of_one_rank_is_the_error_of_all_and_no_folder_is_made(tmp_path):
    outcomes, spoken, made = start(tmp_path, [{}, {"error": "data.path=x: no such file or folder"}, {}])
    assert [str(o) for o in outcomes] == ["rank 1: data.path=x: no such file or folder"] * 3
    assert all(isinstance(o, StartError) for o in outcomes)
    assert spoken == ["rank 1: data.path=x: no such file or folder"] and made == []


def test_an_error_that_all_ranks_have_is_said_once_without_rank_numbers(tmp_path):
    outcomes, spoken, _ = start(tmp_path, [{"error": "train.steps=0: must be at least 1"}] * 3)
    assert spoken == ["train.steps=0: must be at least 1"] == list({str(o) for o in outcomes})


def test_ranks_with_different_configurations_refuse_and_name_the_keys(tmp_path):
    there = {"train": {"steps": 9, "seed": 0}, "data": {"seq_len": 4}}
    here = {"train": {"steps": 5, "seed": 0}, "data": {"seq_len": 4}}
    outcomes, spoken, made = start(tmp_path, [{"config": here}, {"config": there}])
    assert spoken == ["rank 1 was started with another configuration than rank 0: train.steps=9 there, 5 on rank 0"]
    assert [str(o) for o in outcomes] == spoken * 2 and made == []


def test_a_rank_that_never_comes_is_named_within_the_timeout(tmp_path):
    spoken = []
    began = time.monotonic()
    with pytest.raises(StartError, match="rank 1 of 2 did not start within 1 s"):
        agree(dist.HashStore(), 0, 2, error=None, config={}, make_folder=lambda: tmp_path, timeout_s=1.0, speak=spoken.append)
    assert len(spoken) == 1 and time.monotonic() - began < 20.0


def test_two_launches_in_one_second_get_two_folders(tmp_path):
    folders = [make_run_folder(tmp_path, "run", now=1_700_000_000.25 + 0.1 * i) for i in range(3)]
    assert len(set(folders)) == 3 and all(f.is_dir() for f in folders)
    assert [f.name.removeprefix(folders[0].name) for f in folders] == ["", "-2", "-3"]


def test_launches_that_race_for_a_name_never_share_a_folder(tmp_path):
    made = []
    threads = [threading.Thread(target=lambda: made.append(make_run_folder(tmp_path, "run", now=1.7e9))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 16


def test_a_folder_that_holds_a_run_is_not_taken_again(tmp_path):
    folder = claim_run_folder(tmp_path / "mine")
    assert claim_run_folder(folder) == folder
    (folder / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match=r"run\.dir=.*mine: holds a run already \(metrics\.jsonl\)"):
        claim_run_folder(folder)


def test_a_folder_that_cannot_be_made_is_told_with_its_key(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"run\.dir=.*file: the folder cannot be made"):
        claim_run_folder(tmp_path / "file")
    with pytest.raises(OSError, match=r"run\.root=.*x: the folder cannot be made"):
        make_run_folder(tmp_path / "file" / "x", "run")


@pytest.mark.parametrize("given, said", (
    ({"RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not"),
    ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK=x: must be a number"),
    ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK=2: must be below WORLD_SIZE=2"),
))
def test_half_a_launcher_is_refused_with_advice(given, said):
    with pytest.raises(ValueError, match=said):
        check_launcher(given)

"""torchrun as a plain start runs it; not called by hand: train_agent.py PARENT_PID NPROC RESTARTS FOLDER.

Three things more than `python -m torch.distributed.run`: ranks that ended in words of their own are not followed by torchrun's
traceback, which tells of a crash, and are not started again, whatever RESTARTS says, since they would say the same; and it stops
the ranks, as on SIGTERM, when launch/train.py has died.
"""
from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
IS_CHECKOUT = (CHECKOUT / "pyproject.toml").is_file()
if __package__ in (None, ""):
    # As in train.py: a script's own folder comes first on the path, installed or not.
    sys.path[:1] = [str(CHECKOUT)] if IS_CHECKOUT else []

from ringflash.train.exit_codes import REFUSED, TOLD

_POLL_S = 0.5
_CLOSED_BY_TORCHRUN = (-signal.SIGTERM, 128 + signal.SIGTERM)  # a rank that was still leaving when the first had left


def main(argv: list[str]) -> int:
    """Runs NPROC ranks to their end. Returns 0, REFUSED, 1 for what was said otherwise, or 128 + the signal that stopped it; a crash
    of a rank raises torchrun's ChildFailedError."""
    parent, nproc, restarts, folder = argv
    from torch.distributed import run
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(Quiet())
    threading.Thread(target=stop_without, args=(int(parent),), daemon=True).start()
    never_again_after_words(LocalElasticAgent)
    # A file where there is one to run, else the installed module.
    target = [str(CHECKOUT / "launch" / "train.py")] if IS_CHECKOUT else ["-m", "ringflash.launch.train"]
    try:
        run.main(["--standalone", "--nproc-per-node", nproc, "--max-restarts", restarts, *target, "--run-folder", folder])
    except ChildFailedError as error:
        code = spoken_of([failure.exitcode for failure in error.failures.values()])
        if code is None:
            raise
        return code
    except SignalException as stopped:
        return 128 + stopped.sigval
    return 0


def spoken_of(exit_codes: list[int]) -> int | None:
    """The exit code of a run whose failed ranks ended with these, where rank 0 has said why; None when one of them crashed."""
    said = {code for code in exit_codes if code not in _CLOSED_BY_TORCHRUN}
    if not said or not said <= {REFUSED, TOLD}:
        return None
    return REFUSED if said == {REFUSED} else 1


def never_again_after_words(agent: type) -> None:
    """Agents of this class start no ranks again that rank 0 has spoken for."""
    look = agent._monitor_workers

    def look_and_count(self, worker_group):
        found = look(self, worker_group)
        if found.failures and spoken_of([failure.exitcode for failure in found.failures.values()]) is not None:
            self._remaining_restarts = 0
        return found

    agent._monitor_workers = look_and_count


class Quiet(logging.Filter):
    """Drops torchrun's two lines about a rank that ended in words. That, and how, a rank crashed stays."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.msg.startswith("failed (exitcode"):
            return record.args[0] not in (REFUSED, TOLD)
        # That it ends the others comes before it names the failure, so it is not known yet whether there was a crash.
        return not record.msg.startswith("Sending process")


def stop_without(parent: int) -> None:
    """Returns after SIGTERM to this process, once its parent is another than `parent`: nobody is left who would stop the run."""
    # Asked for, not PR_SET_PDEATHSIG: that comes when the *thread* ends that started this process.
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

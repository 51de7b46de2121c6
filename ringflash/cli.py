"""The console script: `ringflash train | evaluate | check | bench ...`, each the main of its file in launch/."""
from __future__ import annotations

import sys
from importlib import import_module

COMMANDS = {
    "train": "train a model on a ring of ranks (Hydra overrides: experiment=quickstart)",
    "evaluate": "held-out loss and keys found of a finished run (run=FOLDER)",
    "check": "prove the ring equal to one device on this machine",
    "bench": "measure kernels and ring against cuDNN / SDPA",
    "plan": "what a step will take: memory, seconds, the best way to divide GPUs",
    "prepare": "make a text ready for training: tokens in one file, with an index of the documents",
}


def main(argv: list[str] | None = None) -> None:
    """Dispatches on the first argument. Exits 2 for no or an unknown command."""
    argv = sys.argv[1:] if argv is None else list(argv)
    usage = "usage: ringflash COMMAND ...\n" + "\n".join(f"  {name:<8} {what}" for name, what in COMMANDS.items())
    if argv[:1] in (["-h"], ["--help"]):
        print(usage)
        return
    if not argv or argv[0] not in COMMANDS:
        problem = f"ringflash: no command {argv[0]!r}\n" if argv else ""
        print(problem + usage, file=sys.stderr)
        sys.exit(2)
    sys.exit(import_module(f"ringflash.launch.{argv[0]}").main(argv[1:]))


if __name__ == "__main__":
    main()

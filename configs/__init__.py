"""Hydra's search path: this folder as `pkg://ringflash.configs`. Read by `launch/` only."""

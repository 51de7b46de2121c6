"""What a training step costs, before it runs: memory by part, FLOPs, bytes and seconds (`ringflash plan`, launch/plan.py)."""

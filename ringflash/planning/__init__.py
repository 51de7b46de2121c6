"""What a training step takes, before it runs: memory by part, FLOPs, bytes and seconds (`ringflash plan`, launch/plan.py).

Note [Memory and time model] in DESIGN.md.
"""

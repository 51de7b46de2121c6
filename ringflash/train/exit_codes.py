"""What a rank's exit code says to whoever started it, beside 0, 1 (a crash, with its traceback) and 128 + a signal."""
REFUSED = 2  # nothing was trained and nothing changed; rank 0 has said why
TOLD = 3  # training cannot go on (not finite, cannot save); rank 0 has said why

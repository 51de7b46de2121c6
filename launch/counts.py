"""Types for argparse: numbers that have to count something. What they refuse ends a command with one line and exit code 2."""
from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def count(least: int) -> Callable[[str], int]:
    """An int >= least."""
    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: must be an int >= {least}") from None
        if number < least:
            raise argparse.ArgumentTypeError(f"{number}: must be >= {least}")
        return number

    return read


def duration(text: str) -> float:
    """A finite float >= 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise argparse.ArgumentTypeError(f"{text!r}: must be a finite number >= 0")
    return number


def counts(least: int, text: str) -> tuple[int, ...]:
    """Comma-separated ints >= least."""
    return tuple(count(least)(part.strip()) for part in text.split(",") if part.strip())

"""A least-recently-used cache that is bounded by weight."""
from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any


class BoundedCache:
    """Keeps the most recently used values whose weights add up to at most max_weight; a heavier value is made, not kept.

    Safe to use from several threads (autograd runs a backward on threads of its own); a value may then be made twice.
    """

    def __init__(self, max_weight: int):
        self.max_weight = max_weight
        self.weight = 0
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get_or_make(self, key: Hashable, make: Callable[[], Any], weigh: Callable[[Any], int] = lambda value: 1) -> Any:
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
                return self._entries[key][0]
        value = make()
        weight = weigh(value)
        with self._lock:
            if weight <= self.max_weight and key not in self._entries:
                self._entries[key] = (value, weight)
                self.weight += weight
                while self.weight > self.max_weight:
                    self.weight -= self._entries.popitem(last=False)[1][1]
        return value

    def __len__(self) -> int:
        return len(self._entries)

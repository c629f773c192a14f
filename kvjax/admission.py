"""How often chunks were asked for, in bounded memory."""

import numpy as np

_ROWS = 4
_MOST = 255
# Odd multipliers that spread a fingerprint over the columns of each row (splitmix64's constants and their kin).
_MULTIPLIERS = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93], np.uint64)


class AskedSketch:
    """Counts how often each of many fingerprints was asked for: a count-min sketch (Cormode and Muthukrishnan,
    2005) that forgets, as TinyLFU's does (Einziger et al., 2017).

    A count is never too low but for what was forgotten, and rarely too high: each fingerprint has a counter in
    every row, shared with others, and the least of them is its count. After as many questions as there are columns
    all counts are halved.

    Args:
        num_columns: counters in a row, a power of two.
    """

    def __init__(self, num_columns: int = 2**20):
        self._shift = np.uint64(64 - (num_columns.bit_length() - 1))
        self._counts = np.zeros((_ROWS, num_columns), np.uint8)
        self._num_asked = 0

    def ask(self, fingerprints: np.ndarray) -> np.ndarray:
        """Counts one question for each of some distinct fingerprints, `uint64`, and returns their counts by now."""
        columns = (fingerprints[None, :] * _MULTIPLIERS[:, None]) >> self._shift
        rows = np.arange(_ROWS)[:, None]
        counts = self._counts[rows, columns]
        least = counts.min(axis=0)
        # Only the least counters rise: the others are too high already.
        raised = np.where((counts == least) & (counts < _MOST), counts + 1, counts).astype(np.uint8)
        np.maximum.at(self._counts, (np.broadcast_to(rows, columns.shape), columns), raised)
        self._num_asked += len(fingerprints)
        if self._num_asked > self._counts.shape[1]:
            self._counts >>= 1
            self._num_asked = 0
        return np.minimum(least.astype(np.int64) + 1, _MOST)

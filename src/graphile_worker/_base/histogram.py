"""Histograms of durations, with fixed logarithmic buckets.

Bucket 0 holds durations below 1/16 ms. The upper limit of each following bucket is larger by the factor
√2, up to 18.6 hours; the last bucket holds everything above. So a percentile that is read from a histogram
is at most 41 % off, and as a rule much less. The limits must never change, because stored rows have them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

UNIT = 1 / 16_000
"""The upper limit of bucket 0, in seconds."""
LAST = 61
"""The index of the last bucket."""
SQUARED = 1 / UNIT**2
"""The bucket of a duration is ``int(duration * duration * SQUARED).bit_length()``, at most `LAST`.

The square doubles when the duration grows by the factor √2, and the number of bits counts how often.
"""


def bucket_of(duration: float) -> int:
    """Return the index of the bucket for a duration in seconds.

    >>> bucket_of(0.0), bucket_of(0.00099), bucket_of(0.001), bucket_of(1e9)
    (0, 8, 9, 61)
    """
    return min(int(duration * duration * SQUARED).bit_length(), LAST) if duration > 0 else 0


def upper_limit(bucket: int) -> float:
    """Return the upper limit of a bucket in seconds. The last bucket has none.

    >>> upper_limit(0) == UNIT, upper_limit(8), upper_limit(10)
    (True, 0.001, 0.002)
    """
    return float(UNIT * 2.0 ** (bucket / 2))


def percentile(counts: Sequence[int], fraction: float) -> float | None:
    """Return the duration that this fraction of the counted durations does not exceed; None without any.

    Within a bucket, durations count as evenly distributed. Durations beyond the last limit count as that
    limit.

    >>> percentile([0, 0, 4], 0.5) == (upper_limit(1) + upper_limit(2)) / 2
    True
    """
    total = sum(counts)
    if not total:
        return None
    rank, below = fraction * total, 0
    for bucket, count in enumerate(counts):
        if count and below + count >= rank:
            lower = upper_limit(bucket - 1) if bucket else 0.0
            upper = upper_limit(min(bucket, LAST - 1))
            return lower + (upper - lower) * max(0.0, rank - below) / count
        below += count
    return upper_limit(LAST - 1)


def trimmed(counts: list[int]) -> list[int]:
    """Return the counts without the zeros at the end.

    >>> trimmed([0, 2, 0, 0])
    [0, 2]
    """
    end = len(counts)
    while end and not counts[end - 1]:
        end -= 1
    return counts[:end]

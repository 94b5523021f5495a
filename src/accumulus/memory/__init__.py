"""Memory: known before anything runs, and what a device has of it.

`estimate` gives a step's peak bytes by part, `curve` for every micro-batch size; `available_bytes`, `device_bytes` and
`parse_bytes` say how much there is; `LiveBytes` counts what a real run holds.
"""

from accumulus.memory.capacity import available_bytes, device_bytes, parse_bytes
from accumulus.memory.curve import MemoryCurve, MemoryEstimate
from accumulus.memory.estimate import curve, estimate
from accumulus.memory.live import LiveBytes

__all__ = [
    "LiveBytes",
    "MemoryCurve",
    "MemoryEstimate",
    "available_bytes",
    "curve",
    "device_bytes",
    "estimate",
    "parse_bytes",
]

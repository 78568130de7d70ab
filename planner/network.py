"""Communication between devices: time of a collective by its size, the number of devices and their links.

Sizes are bytes, `bytes_s` is one direction of a link, `hop_s` the latency of one step. TPI-LLM's observation, that
latency and not bandwidth decides at the edge, is the cross-over of the two all-reduces: a star is faster from a
latency of bytes (n / BW_hub - (n-1) / (n BW)) / (n-2) on.
"""

from __future__ import annotations


def ring_all_reduce_s(size: float, devices: int, bytes_s: float, hop_s: float) -> float:
    """2 (n-1)/n * bytes / BW + 2 (n-1) * latency."""
    if devices < 2:
        return 0.0
    return 2 * (devices - 1) / devices * size / bytes_s + 2 * (devices - 1) * hop_s


def star_all_reduce_s(size: float, devices: int, hub_bytes_s: float, hop_s: float) -> float:
    """Through one device that has the others' parts: 2 (latency + n * bytes / BW of the hub)."""
    if devices < 2:
        return 0.0
    return 2 * (hop_s + devices * size / hub_bytes_s)


def all_reduce_s(size: float, devices: int, bytes_s: float, hop_s: float) -> float:
    """The faster of a ring and a star over the same links."""
    return min(ring_all_reduce_s(size, devices, bytes_s, hop_s), star_all_reduce_s(size, devices, bytes_s, hop_s))


def all_to_all_s(size: float, devices: int, bytes_s: float, hop_s: float) -> float:
    """(n-1)/n * bytes / BW, and one step."""
    return (devices - 1) / devices * size / bytes_s + hop_s if devices > 1 else 0.0


def send_s(size: float, bytes_s: float, hop_s: float) -> float:
    """From one device to the next."""
    return size / bytes_s + hop_s


def streamed_layer_s(compute_s: float, layer_bytes: float, disk_bytes_s: float) -> float:
    """A layer whose weights come from a disk while the one before it is computed (TPI-LLM's sliding window)."""
    return max(compute_s, layer_bytes / disk_bytes_s)

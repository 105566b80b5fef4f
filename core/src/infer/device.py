"""Getting a step's small arrays to where the kernels run and back, without waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor


def upload(values: np.ndarray[Any, Any], device: torch.device, out: Tensor | None = None) -> Tensor:
    """``values`` on ``device``; into the leading rows of ``out`` where that is given.

    Pinned pages come from torch's caching allocator, which does not hand them out again before the copy is done.
    """
    host = torch.from_numpy(values)
    if device.type != "cpu":
        host = host.pin_memory()
    if out is None:
        return host.to(device, non_blocking=True)
    return out[: len(host)].copy_(host, non_blocking=True)


def download(values: Tensor) -> Tensor:
    """``values`` on the host, to be read once a later ``mark`` has been reached."""
    if values.device.type == "cpu":
        return values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return host.copy_(values, non_blocking=True)


def mark(device: torch.device) -> Callable[[], None]:
    """A function that waits until the device has done all that it was told so far."""
    if device.type == "cpu":
        return lambda: None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event.synchronize

"""Measures when a device reaches points in its work. Creating a Timestamp does not make the host wait."""

import time

import torch


class Timestamp:
    """The point at which a device has finished all work that the host launched before this object was created.

    On a GPU, a CUDA event records the time of the Timestamp. On a CPU, the Timestamp has the time at which the object
    was created.
    """

    def __init__(self, device: torch.device) -> None:
        self._seconds = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def passed(self) -> bool:
        """Returns whether the device has reached the Timestamp."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Makes the host wait until the device has reached the Timestamp."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: "Timestamp") -> float:
        """Returns the seconds from the Timestamp `earlier` to this Timestamp.

        Both Timestamps must have the same device, and the device must have reached both.
        """
        if self._event is None or earlier._event is None:
            return self._seconds - earlier._seconds
        return earlier._event.elapsed_time(self._event) / 1e3

"""Times points in a device's work without making the host wait for the device."""

import time

import torch


class Timestamp:
    """A point in a device's work: the end of what the host has launched so far.

    A GPU notes the time itself when it gets there. A CPU is there already.
    """

    def __init__(self, device: torch.device) -> None:
        self._seconds = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def passed(self) -> bool:
        """Returns whether the device has got here."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Makes the host wait until the device gets here."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: "Timestamp") -> float:
        """Returns the seconds between two points of one device, which has passed both."""
        if self._event is None or earlier._event is None:
            return self._seconds - earlier._seconds
        return earlier._event.elapsed_time(self._event) / 1e3

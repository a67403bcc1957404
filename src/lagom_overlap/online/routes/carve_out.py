"""Torch's SM carve-out as a route of the computation's side; where nothing would heed it, a route that says why."""

from lagom_overlap.collective import LaunchConfig
from lagom_overlap.engines.carve_out import TorchCarveOut
from lagom_overlap.errors import BackendError
from lagom_overlap.online.routes.compute import ComputeRoute, NoComputeRoute


class CarveOutRoute:
    """Torch's SM carve-out on this rank's device.

    Raises:
        BackendError: if no kernel here would heed it.
    """

    def __init__(self, flag: TorchCarveOut | None = None) -> None:
        self._flag = flag or TorchCarveOut()
        caveat = f" ({self._flag.caveat})" if self._flag.caveat else ""
        self.description = f"torch's SM carve-out, one for the whole step{caveat}"

    def check(self, launch: LaunchConfig) -> None:
        """Refuses an order or priority, and a carve-out that leaves no SM."""
        _refuse_order(launch)
        if launch.sm_carveout is not None and launch.sm_carveout >= self._flag.num_sms:
            raise BackendError(f"a carve-out of {launch.sm_carveout} SMs leaves none of {self._flag.num_sms}")

    def apply(self, launch: LaunchConfig) -> None:
        """Sets the flag."""
        self._flag.set(launch.sm_carveout)

    def close(self) -> None:
        """Gives the flag the value that it had."""
        self._flag.set(None)


def open_compute_route() -> ComputeRoute:
    """Torch's carve-out where something heeds it, else one that says why not."""
    try:
        return CarveOutRoute()
    except BackendError as error:
        return NoComputeRoute(str(error))


def _refuse_order(launch: LaunchConfig) -> None:
    if launch.order is not None or launch.priority is not None:
        raise BackendError(f"launch order and stream priority of a running job are its framework's ({launch})")

"""`doctor` reports on the machine and on how a model runs on it; `check` is a self-test with small models.

``python -m gpipe_fast.doctor`` prints the report on this machine; ``--check`` also runs the self-test.
"""

from collections.abc import Callable, Iterable

from gpipe_fast.devices import Device
from gpipe_fast.gpipe import GPipe
from gpipe_fast.reports import checkup
from gpipe_fast.reports.checkup import Case, Checkup
from gpipe_fast.reports.doctor import doctor

__all__ = ["Case", "Checkup", "check", "doctor"]


def check(devices: Iterable[Device] | None = None, show: Callable[[str], object] | None = None) -> Checkup:
    """Compares small models with the plain loop, in every checkpoint mode and over every transport.

    It takes about a minute. On GPUs, cases run with ``torch.use_deterministic_algorithms``, without which
    equal bits are not guaranteed. A case that fails does not end the check. Then one stage on the first GPU
    is trained with and without fused kernels, and both are compared with float64::

        python -m gpipe_fast.doctor --check

    Args:
        devices: one device for each stage, at least two; by default the first visible GPUs, or the CPU.
        show: receives the report in parts as it grows: the machine, each case, and the result; for example
            ``print``.

    Raises:
        TypeError: ``devices`` is not a list of devices.
        ValueError: a device is neither a CPU nor a CUDA device.
        IndexError: there are fewer than two devices.
    """
    return checkup.check(GPipe, devices, show)

"""Faults that are not a kernel's: of the environment, and of a device, which end a worker process.

A fault of the environment (a full disk, a missing compiler) says nothing about the configuration that met it:
the configuration is tried again in a new process. A fault that both a machine and a kernel may cause (memory,
open files or disk space ran out) is suspected: if it returns in a new process, and the machine has enough of
the resource, it is the failure of the configuration.

After a device fault (an illegal access, for example) every further call in the process fails with the same
error, and only a new process can use the device again. The worker therefore exits with a status that
identifies the fault. The process that started the worker converts the status to a message with
`describe_exit`.
"""

from __future__ import annotations

import errno
import re

from tunebench.errors import (
    DeviceError,
    EnvironmentFault,
    MissingDependency,
    SuspectedFault,
    VariantError,
    describe_error,
    message_of,
    user_place,
)

__all__ = [
    "DEVICE_FAULT",
    "MEMORY_STATUS",
    "DeviceLost",
    "LaunchRefused",
    "describe_exit",
    "environment_fault",
    "names_environment",
    "names_mended_fault",
    "names_missing",
]

_EXHAUSTED = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.ENOMEM),
    *(errno.EMFILE, errno.ENFILE, errno.EAGAIN),
)
"""Errors of the system that a machine or a kernel may cause."""

_SAYS_EXHAUSTED = re.compile(
    rf"\[Errno (?:{'|'.join(map(str, _EXHAUSTED))})\]"
    r"|No space left on device|Disk quota exceeded|File too large|Read-only file system"
    r"|Too many open files|Cannot allocate memory|virtual memory exhausted"
    r"|can't start new thread|Resource temporarily unavailable"
    r"|(?:fatal error|error): (?:Killed signal|error writing to)|PermissionError: \[Errno 13\]"
)
_SAYS_MISSING = re.compile(
    r"cannot execute '?cc1plus"
    r"|\$TUNEBENCH_CACHE: |^\$CXX is |no g\+\+; install|is not installed; run: pip install"
)
"""Text of failures of the environment, in messages of compilers and in records of earlier versions."""

MEMORY_STATUS = 79
"""Exit status of a worker that was ended because it held too much memory."""

DEVICE_FAULT = "CUDA_ERROR_"
"""Beginning of the name of every fault of a device."""

_FIRST_STATUS = 80
"""First exit status of a fault: above those of sysexits.h (64 to 78) and below those of signals (128)."""

# Faults by the driver's name. The exit status is the position in this table, so only append to it.
# Source: cuda.h, CUresult, the errors that leave "the process in an inconsistent state".
_FAULTS = {
    "CUDA_ERROR_UNKNOWN": "the device was lost for a reason that the driver does not know",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "the kernel read or wrote memory it does not own",
    "CUDA_ERROR_LAUNCH_TIMEOUT": "the driver stopped a kernel that ran too long",
    "CUDA_ERROR_ASSERT": "an assertion in the kernel failed",
    "CUDA_ERROR_HARDWARE_STACK_ERROR": "the kernel corrupted its call stack, or its stack overflowed",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": "the kernel met an instruction that the device does not have",
    "CUDA_ERROR_MISALIGNED_ADDRESS": "the kernel accessed an address that is not aligned to the access",
    "CUDA_ERROR_INVALID_ADDRESS_SPACE": "the kernel used an address in a memory space it is not in",
    "CUDA_ERROR_INVALID_PC": "the kernel jumped out of its code",
    "CUDA_ERROR_LAUNCH_FAILED": "an exception occurred on the device while the kernel ran",
    "CUDA_ERROR_TENSOR_MEMORY_LEAK": "the kernel ended without freeing its tensor memory",
    "CUDA_ERROR_ECC_UNCORRECTABLE": "the device found an error in its memory that it could not correct",
    "CUDA_ERROR_NVLINK_UNCORRECTABLE": "the device found an error of its link that it could not correct",
    "CUDA_ERROR_CONTAINED": "the device contained a hardware error to this process",
}


def environment_fault(error: BaseException) -> EnvironmentFault | None:
    """Return the fault of the environment that an exception reports; None if it is the kernel's fault.

    Args:
        error: The exception; that of a user's own code is the kernel's, unless a resource is exhausted.

    Returns:
        A `SuspectedFault` if the kernel may have caused it.
    """
    if isinstance(error, EnvironmentFault):
        return error
    if isinstance(error, VariantError) and isinstance(error.__cause__, MemoryError):
        return SuspectedFault(describe_error(error))
    of_no_user = isinstance(error, OSError | ImportError) and not user_place(error)
    missing = names_missing(message_of(error)) or (of_no_user and isinstance(error, ImportError))
    if isinstance(error, MissingDependency) or missing:
        return EnvironmentFault(describe_error(error))
    exhausted = isinstance(error, OSError) and error.errno in _EXHAUSTED
    if exhausted or of_no_user or isinstance(error, MemoryError) or names_environment(message_of(error)):
        return SuspectedFault(describe_error(error))
    return None


def names_mended_fault(text: str) -> bool:
    """Return whether a recorded compile failure is one that later versions of tunebench do not have.

    Args:
        text: The reason of the failure.
    """
    # Generic lambdas with NVRTC 13.0, and numba-cuda with NumPy 2.5.
    faults = "host functions are not allowed in JIT mode", "module 'numpy' has no attribute 'row_stack'"
    return any(fault in text for fault in faults)


def names_environment(text: str) -> bool:
    """Return whether a message reports a fault of the environment.

    Args:
        text: Message of a compiler, or the reason of a recorded failure.
    """
    return names_missing(text) or _SAYS_EXHAUSTED.search(text) is not None


def names_missing(text: str) -> bool:
    """Return whether a message says that a program or a folder is missing, which is never a kernel's fault.

    Args:
        text: Message of a compiler, or the reason of a recorded failure.
    """
    return _SAYS_MISSING.search(text) is not None


class LaunchRefused(DeviceError):
    """A configuration exceeds a limit of the device and can never run there."""


class DeviceLost(DeviceError):
    """The device is unusable for this process, which must exit with `status`.

    Args:
        name: The driver's name of the fault, such as ``"CUDA_ERROR_ILLEGAL_ADDRESS"``.
        detail: The operation that failed.
    """

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail}")
        self.name, self.detail = name, detail

    def __reduce__(self) -> tuple[type[DeviceLost], tuple[str, str]]:
        return (DeviceLost, (self.name, self.detail))

    @property
    def status(self) -> int:
        """Exit status that identifies this fault."""
        names = list(_FAULTS)
        return _FIRST_STATUS + (names.index(self.name) if self.name in names else 0)


def describe_exit(status: int) -> str | None:
    """Return the fault that ended a worker.

    Args:
        status: Exit status of the worker process.

    Returns:
        The driver's name of the fault and an explanation, or None if the status does not encode a fault.
    """
    if status == MEMORY_STATUS:
        return (
            "the worker and the processes it started held too much memory: TUNEBENCH_WORKER_MEMORY in GB, by "
            "default 75 % of the machine's"
        )
    index = status - _FIRST_STATUS
    if not 0 <= index < len(_FAULTS):
        return None
    name, words = list(_FAULTS.items())[index]
    return f"{name}: {words}"

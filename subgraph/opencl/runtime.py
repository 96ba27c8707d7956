"""OpenCL devices of this machine, and a runtime for each: context, queues, programs built once.

pyopencl is imported when devices are first listed, so that a machine without it, or without a
driver, only lacks the device OPENCL.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from subgraph.errors import DeviceError
from subgraph.graph.limits import check_time
from subgraph.system.environment import base_folder, user_folder
from subgraph.system.exiting import uninterruptedly
from subgraph.system.forking import free_in_child
from subgraph.system.trusted_files import UntrustedFileError, check_folder, make_folder

if TYPE_CHECKING:
    import pyopencl as cl

_LOG = logging.getLogger("subgraph")
_SOURCES = "subgraph.ops"  # the package whose folders contain the .cl files
_INCLUDE = re.compile(r'^#include "(.+)\.cl"$', re.MULTILINE)
_INTEL = "pip install 'subgraph-ml[opencl-intel]'"
SIMULATOR = "Oclgrind"  # a platform that checks kernels; it reports a GPU


@attrs.frozen
class ClSource:
    """An OpenCL program: a file ``<name>.cl`` in ``ops/``, or generated text, with definitions.

    Attributes:
        name: Path of the file without ``.cl``, or a name of the generated program for messages.
        text: The generated text; "" for a file.
        defines: Preprocessor definitions, sorted by name (`definitions`).
    """

    name: str
    text: str = ""
    defines: tuple[tuple[str, str | int], ...] = ()

    def code(self) -> str:
        """Return the text of the program, with its definitions."""
        head = "".join(f"#define {key} {value}\n" for key, value in self.defines)
        return head + (self.text or _file_text(self.name))


@cache
def _file_text(name: str) -> str:
    """Return the text of a file below ``ops/``, with those that it includes in their places."""
    from importlib.resources import files

    text = files(_SOURCES).joinpath(f"{name}.cl").read_text()
    return _INCLUDE.sub(lambda found: _file_text(found[1]), text)


@attrs.frozen
class ClTraits:
    """Properties of a device that decide between variants of kernels.

    Attributes:
        is_gpu: Whether work-items run in lockstep over fast local memory.
        vector: Elements of a float32 vector; 1 on a GPU, whose work-items are scalar.
        max_group: Largest number of work-items in a work-group.
        units: Number of compute units.
        fp16: Whether it supports float16.
        fp64: Whether it supports float64.
    """

    is_gpu: bool
    vector: int
    max_group: int
    units: int
    fp16: bool
    fp64: bool


def _prepare_environment() -> None:
    """Set the folder in which PoCL caches built programs to one that only this user can write.

    PoCL executes the code that it finds there.
    """
    if "POCL_CACHE_DIR" in os.environ:
        return
    for base in dict.fromkeys((base_folder(), user_folder())):
        folder = base / "pocl"
        try:
            make_folder(folder)
            check_folder(folder)
        except UntrustedFileError as error:
            _LOG.warning("OpenCL programs in %s are not used: %s", folder, error.strerror)
        except OSError:
            continue
        else:
            if os.access(folder, os.W_OK):  # PoCL finds no devices with a read-only folder
                break
    else:
        folder = Path(tempfile.mkdtemp(prefix="subgraph-pocl-"))
    os.environ["POCL_CACHE_DIR"] = str(folder)


@cache
def opencl() -> Any:
    """Return the module pyopencl.

    Raises:
        DeviceError: It is not installed or cannot be loaded.
    """
    _prepare_environment()
    try:
        import pyopencl
    except ImportError as error:
        raise DeviceError(
            f"OpenCL needs the package pyopencl ({error}): pip install 'subgraph-ml[opencl]'"
        ) from error
    return pyopencl


def _platforms(api: Any) -> list[cl.Platform]:
    """Return the machine's OpenCL platforms, with Intel's for the CPU if it is installed by pip.

    pip installs Intel's driver in a folder that the OpenCL loader does not search. The loader is
    therefore pointed to a temporary folder that lists it and the drivers of the system.
    """
    library = Path(sys.prefix, "lib", "libintelocl.so")
    if "OCL_ICD_VENDORS" in os.environ or not library.is_file():
        return list(api.get_platforms())
    with tempfile.TemporaryDirectory(prefix="subgraph-icd-") as folder:
        for known in sorted(Path("/etc/OpenCL/vendors").glob("*.icd")):
            shutil.copy(known, folder)
        Path(folder, "subgraph-intel.icd").write_text(f"{library}\n")
        os.environ["OCL_ICD_VENDORS"] = folder
        try:
            return list(api.get_platforms())
        finally:
            # Child processes must not search the folder, which no longer exists then.
            del os.environ["OCL_ICD_VENDORS"]


def _refusal(device: cl.Device) -> str:
    """Return why a device cannot be used; "" if it can.

    The compiler in PoCL knows the processors at the time of its release. On a newer one no program
    can be built ("unknown target CPU"). PoCL links a kernel when it is first run, by the linker of
    the system, and aborts the process if there is none.
    """
    if "PoCL" not in device.version or not device.type & opencl().device_type.CPU:
        return ""
    if sys.platform.startswith("linux") and shutil.which("ld") is None:
        return (
            f"{_version(device)} links kernels by the program 'ld', which is not installed; "
            f"install it (package binutils of most systems), or Intel's OpenCL for CPUs: {_INTEL}"
        )
    api = opencl()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            api.Program(api.Context([device]), "__kernel void probe(void) {}").build()
    except api.Error as error:
        said = [line for line in str(error).splitlines() if line.startswith("error:")]
        return (
            f"{_version(device)} does not compile for this processor "
            f"({said[0] if said else error}); install Intel's OpenCL for CPUs: {_INTEL}"
        )
    return ""


def _version(device: cl.Device) -> str:
    """Return the version of a device's driver, without the list of its features."""
    return str(device.version).split(",")[0].strip()


# The process that called the drivers first, so that their threads and handles are in it alone.
_driver_process = 0


@cache
def find_devices() -> tuple[cl.Device, ...]:
    """Return the machine's OpenCL devices: GPUs first, then others, simulators last.

    A driver that is installed twice lists its devices twice; each is returned once.

    Raises:
        DeviceError: There is no pyopencl, no driver, or no device.
    """
    global _driver_process
    api = opencl()
    _driver_process = _driver_process or os.getpid()
    try:
        platforms = _platforms(api)
    except api.Error as error:
        raise DeviceError(
            f"no OpenCL driver was found ({error}): install your device's, or PoCL for the CPU: "
            "pip install 'pyopencl[pocl]'"
        ) from error
    found: dict[tuple[str, str, str, int], cl.Device] = {}
    refusals: list[str] = []
    for platform in platforms:
        try:
            devices = platform.get_devices()
        except api.Error:
            continue  # a platform without devices raises an error
        count: dict[tuple[str, str, str], int] = {}
        for device in devices:
            refusal = _refusal(device)
            if refusal:
                refusals.append(refusal)
                continue
            kind = (platform.name, device.vendor, device.name)
            # Equal cards of one machine have the same name; the count keeps them apart, while the
            # same card of a second driver entry gets the same number.
            number = count[kind] = count.get(kind, 0) + 1
            found.setdefault((*kind, number), device)
    if refusals and not found:
        raise DeviceError(f"no OpenCL device can be used: {'; '.join(refusals)}")
    if not found:
        names = ", ".join(p.name for p in platforms) or "none"
        raise DeviceError(f"no OpenCL device was found; platforms: {names}")
    gpu = api.device_type.GPU

    def rank(kind: tuple[str, str, str, int]) -> int:
        if kind[0] == SIMULATOR:
            return 2
        return int(not found[kind].type & gpu)

    return tuple(found[kind] for kind in sorted(found, key=rank))


def traits_of(device: cl.Device) -> ClTraits:
    """Return the properties that a device reports and that decide between variants of kernels."""
    is_gpu = bool(device.type & opencl().device_type.GPU)
    extensions = set(device.extensions.split())
    vector = 1 if is_gpu else max(1, device.native_vector_width_float)
    if not is_gpu and "PoCL" in device.version:
        # On processors that it does not know, PoCL's compiler aborts the process for vectors of 16.
        vector = min(vector, 8)
    return ClTraits(
        is_gpu=is_gpu,
        vector=vector,
        max_group=device.max_work_group_size,
        units=device.max_compute_units,
        fp16="cl_khr_fp16" in extensions,
        fp64="cl_khr_fp64" in extensions or device.double_fp_config != 0,
    )


class Runtime:
    """One device's context and programs, shared by all models; each request has its own queue.

    Attributes:
        device: The device.
        name: Its name and its platform's.
        context: Its context.
        traits: Properties that decide between variants of kernels.
        survives_fork: Whether the driver works in a forked child of this process.
    """

    def __init__(self, device: cl.Device) -> None:
        """Create a context for the device.

        Raises:
            DeviceError: The driver refuses, or does not work in this process.
        """
        api = opencl()
        self.device = device
        self.name = f"{device.name.strip()} ({device.platform.name.strip()})"
        self.survives_fork = device.platform.name == SIMULATOR  # which has no threads
        self._process = _driver_process
        self.check_process()
        self.traits = traits_of(device)
        try:
            self.context = api.Context([device])
        except api.Error as error:
            raise DeviceError(f"OpenCL device {device.name!r} cannot be opened: {error}") from error
        self._programs: dict[ClSource, Any] = {}
        self._lock = free_in_child(threading.Lock())

    def check_process(self) -> None:
        """Check that the driver works in this process.

        Drivers do not work in a forked child of the process that called them first: NVIDIA's ends
        the child by SIGSEGV, and PoCL waits without end for threads that only the parent has.

        Raises:
            DeviceError: This process is such a child.
        """
        if not self.survives_fork and os.getpid() != self._process:
            raise DeviceError(
                f"the driver of OpenCL device {self.name!r} was used before this process was "
                "forked, and does not work in forked processes: use processes that are started "
                "by 'spawn' or 'forkserver', or another device"
            )

    def queue(self, *, profiling: bool = False) -> cl.CommandQueue:
        """Return a new in-order queue; with ``profiling``, its events record times."""
        api = opencl()
        flags = api.command_queue_properties.PROFILING_ENABLE if profiling else 0
        queue: cl.CommandQueue = api.CommandQueue(self.context, self.device, flags)
        return queue

    def kernel(self, source: ClSource, name: str) -> cl.Kernel:
        """Return a new kernel object of a program, which is built at its first use.

        Raises:
            DeviceError: The program does not build (the message has the compiler's output), or has
                no kernel of this name.
        """
        api = opencl()
        try:
            kernel: cl.Kernel = api.Kernel(self._program(source), name)
        except api.Error as error:
            raise DeviceError(
                f"OpenCL program {source.name!r} has no usable kernel {name!r} on "
                f"{self.device.name!r}: {error}"
            ) from error
        return kernel

    def _program(self, source: ClSource) -> cl.Program:
        with self._lock:
            program = self._programs.get(source)
            if program is None:
                # The lock is held during the build, so that requests that need the same program
                # build it once.
                program = self._programs[source] = self._build(source)
            return program

    def _build_options(self) -> list[str]:
        """Return the options of the compiler: quotients and roots are rounded as on the CPU.

        OpenCL allows quotients of float32 an error of 2.5 units in the last place unless the
        compiler is asked for correct ones, and some drivers make use of that: values on the border
        between two steps of a quantization were rounded to the other one.
        """
        exact = opencl().device_fp_config.CORRECTLY_ROUNDED_DIVIDE_SQRT
        rounded = self.device.single_fp_config & exact
        options = ["-cl-mad-enable", "-w"]
        return [*options, "-cl-fp32-correctly-rounded-divide-sqrt"] if rounded else options

    @uninterruptedly
    def _build(self, source: ClSource) -> cl.Program:
        check_time(f"building OpenCL program {source.name!r}")
        api = opencl()
        try:
            with warnings.catch_warnings():
                # Drivers give warnings of no interest (loop not vectorized), some on stderr unless
                # -w inhibits them; the error of a failed build has the output.
                warnings.simplefilter("ignore")
                program = api.Program(self.context, source.code())
                built: cl.Program = program.build(self._build_options())
        except api.Error as error:
            said = "\n".join(str(error).strip().splitlines()[:20])
            raise DeviceError(
                f"OpenCL program {source.name!r} with {dict(source.defines)} does not build on "
                f"{self.device.name!r}:\n{said}"
            ) from error
        return built

    def buffer(self, nbytes: int) -> cl.Buffer:
        """Return uninitialised device memory.

        Raises:
            DeviceError: The device has not enough memory left.
        """
        api = opencl()
        try:
            # OpenCL refuses buffers of 0 bytes.
            memory: cl.Buffer = api.Buffer(self.context, api.mem_flags.READ_WRITE, max(nbytes, 1))
        except api.Error as error:
            raise DeviceError(
                f"OpenCL device {self.device.name!r} has no {nbytes / 1e6:.1f} MB left "
                f"(of {self.device.global_mem_size / 1e6:.0f} MB): {error}; use smaller inputs or "
                "another device"
            ) from error
        return memory


@cache
def runtime(index: int) -> Runtime:
    """Return the runtime of the device with this position in `find_devices`.

    Raises:
        DeviceError: There is no such device, or it cannot be opened.
    """
    devices = find_devices()
    if not 0 <= index < len(devices):
        raise DeviceError(f"there is no OpenCL device {index}; there are {len(devices)}")
    return Runtime(devices[index])


def definitions(values: Mapping[str, str | int]) -> tuple[tuple[str, str | int], ...]:
    """Return preprocessor definitions in the form that `ClSource` takes."""
    return tuple(sorted(values.items()))

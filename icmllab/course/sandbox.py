"""A Python kernel that can do no harm: bubblewrap around it, limits on it, a watch beside it.

The kernel sees a read-only Python and package, a private ``/tmp`` and home in memory, no network,
no process but its own and no environment variable but the few set here. It talks through Unix
sockets in a folder of its own (the ipc transport), since it has no network to talk over.
"""

import contextlib
import importlib.util
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

HOME = "/home/student"
"""Where the kernel starts: an empty folder in memory."""

_MIB = 2**20


class SandboxError(RuntimeError):
    """A sandbox that cannot be set up on this machine; the message says what to install."""


@dataclass(frozen=True)
class Limits:
    """What one kernel may use.

    Attributes:
        memory: bytes of memory, all processes together; also of each one's own data.
        processes: processes and threads.
        file_size: bytes of one file.
        disk: bytes of all files together, which lie in memory.
        cpu: seconds of processor time, of one process and of those that run at a time together.
        cell: seconds that one cell may take.
        notebook: seconds that all cells together may take.
        output: bytes of output of one cell before the kernel is stopped.
        message: bytes of one message from the kernel.
    """

    memory: int = 3 * 1024 * _MIB
    processes: int = 64
    file_size: int = 32 * _MIB
    disk: int = 64 * _MIB
    cpu: int = 300
    cell: float = 60.0
    notebook: float = 600.0
    output: int = 16 * _MIB
    message: int = 16 * _MIB

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{name} must be > 0: got {value}")


INSTALL = (
    "grading runs students' code under bubblewrap. Install it (Debian, Ubuntu: "
    "sudo apt install bubblewrap), or grade without protection, only code that you trust: "
    "make grade LAB=... SANDBOX=off"
)


def require() -> None:
    """Check that a sandbox can be made here.

    Raises:
        SandboxError: bubblewrap or prlimit is missing, or the system forbids user namespaces.
    """
    missing = [tool for tool in ("bwrap", "prlimit") if shutil.which(tool) is None]
    if missing:
        raise SandboxError(f"{' and '.join(missing)} not found: {INSTALL}")
    with tempfile.TemporaryDirectory(prefix="icmllab-") as runtime:
        probe = [*wrap(Path(runtime), Limits()), sys.executable, "-c", "import icmllab, ipykernel"]
        done = subprocess.run(probe, capture_output=True, text=True, check=False)
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise SandboxError(
            f"bubblewrap cannot make a sandbox here ({why[0]}). It needs unprivileged user "
            f"namespaces (sysctl kernel.unprivileged_userns_clone, "
            f"kernel.apparmor_restrict_unprivileged_userns). {INSTALL}"
        )


def _code_folders() -> list[Path]:
    """What the kernel must read: the interpreter, its packages, this package."""
    import icmllab

    kernels = importlib.util.find_spec("icmllab.kernels")
    paths = sysconfig.get_paths()
    folders = [sys.prefix, sys.base_prefix, sys.exec_prefix, paths["purelib"], paths["platlib"]]
    folders += [Path(icmllab.__file__).parent, *kernels.submodule_search_locations]
    resolved = sorted({Path(f).resolve() for f in folders} | {Path(sys.prefix)})
    return [f for f in resolved if f.is_dir() and not f.is_relative_to("/usr")]


def wrap(runtime: Path, limits: Limits) -> list[str]:
    """The command line that runs what follows it in a sandbox that can write to ``runtime``."""
    in_memory = ["--size", str(limits.disk), "--tmpfs"]
    command = ["bwrap", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    command += [f"--unshare-{ns}" for ns in ("user", "pid", "net", "ipc", "uts", "cgroup-try")]
    command += ["--disable-userns", "--uid", "1000", "--gid", "1000", "--hostname", "lab"]
    for folder in ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin"):
        if Path(folder).is_symlink():
            command += ["--symlink", os.readlink(folder), folder]
        elif Path(folder).is_dir():
            command += ["--ro-bind", folder, folder]
    for file in ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives", "/etc/fonts"):
        command += ["--ro-bind-try", file, file]
    command += ["--proc", "/proc", "--dev", "/dev"]
    for folder in ("/dev/shm", "/tmp", HOME):
        command += [*in_memory, folder]
    for folder in _code_folders():
        command += ["--ro-bind", str(folder), str(folder)]
    command += ["--bind", str(runtime), str(runtime), "--remount-ro", "/", "--chdir", HOME]
    command += ["--clearenv"]
    for name, value in _environment(HOME).items():
        command += ["--setenv", name, value]
    return [*_limited(limits), *command]


def _limited(limits: Limits) -> list[str]:
    # data, not address space: torch maps far more than it uses
    return [
        "prlimit",
        f"--data={limits.memory}",
        f"--nproc={limits.processes}",
        f"--fsize={limits.file_size}",
        f"--cpu={limits.cpu}:{limits.cpu + 5}",
        "--core=0",
        "--nofile=512",
        "nice",
        "-n",
        "5",
    ]


def _environment(home: str) -> dict[str, str]:
    return {
        "HOME": home,
        "USER": "student",
        "LOGNAME": "student",
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "TMPDIR": "/tmp",
        "MPLCONFIGDIR": "/tmp/matplotlib",
        "IPYTHONDIR": "/tmp/ipython",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "ICMLLAB_STATIC": "1",
    }


def kernelspec(runtime: Path, limits: Limits, *, sandboxed: bool = True):
    """The kernelspec of a kernel whose sockets lie in ``runtime``.

    ``sandboxed=False`` keeps the limits of each process and drops the walls.
    """
    from jupyter_client.kernelspec import KernelSpec

    python = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    python += ["--HistoryManager.enabled=False", "--IPKernelApp.log_level=50"]
    if sandboxed:
        argv, env = [*wrap(runtime, limits), *python], {}
    else:
        home = runtime / "home"
        home.mkdir(exist_ok=True)
        env = {k: v for k, v in _environment(str(home)).items() if k != "PATH"}
        argv = [*(_limited(limits) if shutil.which("prlimit") else []), *python]
    return KernelSpec(
        argv=argv,
        env=env,
        display_name="Python in a sandbox",
        language="python",
        interrupt_mode="message",
    )


class Watch(threading.Thread):
    """Stops a kernel that takes more than its limits, all of its processes at once.

    Limits of one process do not bound what many take together, and the number of processes is not
    limited for an administrator's account; so this looks ten times a second.

    Attributes:
        reason: why the kernel was stopped, or None.
    """

    def __init__(self, pid: int, runtime: Path, limits: Limits):
        super().__init__(daemon=True, name="icmllab-watch")
        self.pid, self.runtime, self.limits = pid, runtime, limits
        self.reason: str | None = None
        self._over = threading.Event()

    def run(self) -> None:
        import psutil

        try:
            top = psutil.Process(self.pid)
        except psutil.NoSuchProcess:
            return
        while not self._over.wait(0.1):
            try:
                family = [top, *top.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            self.reason = self._excess(family)
            if self.reason:
                kill_family(family)
                return

    def stop(self) -> None:
        """End the watch."""
        self._over.set()
        self.join()

    def _excess(self, family: list) -> str | None:
        import psutil

        if len(family) > self.limits.processes:
            return f"more than {self.limits.processes} processes"
        memory = cpu = 0
        for process in family:
            with contextlib.suppress(psutil.Error):
                memory += process.memory_info().rss
                cpu += sum(process.cpu_times()[:2])
        if cpu > self.limits.cpu:
            return f"more than {self.limits.cpu} s of processor time"
        if memory > self.limits.memory:
            return f"more than {self.limits.memory // _MIB} MiB of memory"
        used = files = 0
        with contextlib.suppress(OSError), os.scandir(self.runtime) as entries:
            for entry in entries:
                files += 1
                # a folder is no business of a kernel's here
                size = entry.stat(follow_symlinks=False).st_size if entry.is_file() else 0
                used += math.inf if entry.is_dir() and entry.name != "home" else size
                if files > 64 or used > 4 * _MIB:
                    return "files beside its sockets"
        return None


def kill_family(family: list) -> None:
    """Kill processes, the first last: it is the one whose end takes the others with it."""
    import psutil

    for process in family:
        with contextlib.suppress(psutil.Error):
            process.kill()

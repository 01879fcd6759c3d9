"""One student's kernel: run cells, ask it for answers, and believe nothing that it says.

What comes back is bounded in size, reduced to a few kinds of output (no HTML, no scripts), and
tied to the request that it answers. The kernel is stopped when it leaves its limits.
"""

import contextlib
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from queue import Empty

import nbformat

from icmllab.course import wire
from icmllab.course.remote import MIME
from icmllab.course.sandbox import Limits, Watch, kernelspec

KEPT_TEXT = 20_000
"""Characters of a cell's text output that the graded notebook keeps."""

KEPT_IMAGE = 2_000_000
"""Characters of an encoded figure that the graded notebook keeps."""


class KernelGone(RuntimeError):
    """The kernel has ended or was stopped; the message says why."""


class StudentError(Exception):
    """An exception that the student's code raised while a test called it.

    It is also of the built-in type that was raised there, so that a test can expect a ValueError.
    """


_BUILTIN = {
    kind.__name__: type(kind.__name__, (StudentError, kind), {})
    for kind in (
        ArithmeticError,
        AssertionError,
        AttributeError,
        IndexError,
        KeyError,
        LookupError,
        NameError,
        NotImplementedError,
        OverflowError,
        RuntimeError,
        TypeError,
        ValueError,
        ZeroDivisionError,
    )
}


class StudentKernel:
    """A kernel for one notebook, made by the ``with`` statement.

    Args:
        limits: what it may use.
        sandboxed: False runs it without walls.
    """

    def __init__(self, limits: Limits, *, sandboxed: bool = True):
        self.limits, self.sandboxed = limits, sandboxed
        self.gone: str | None = None

    def __enter__(self) -> "StudentKernel":
        import zmq
        from jupyter_client import KernelManager

        # short: the path of a Unix socket may have about a hundred characters
        self.runtime = Path(tempfile.mkdtemp(prefix="icmllab-"))
        try:
            context = zmq.Context()
            context.setsockopt(zmq.MAXMSGSIZE, self.limits.message)
            context.setsockopt(zmq.RCVHWM, 64)
            context.setsockopt(zmq.LINGER, 0)
            self.context = context
            self.manager = KernelManager(
                context=context,
                transport="ipc",
                ip=str(self.runtime / "k"),
                connection_file=str(self.runtime / "c.json"),
            )
            spec = kernelspec(self.runtime, self.limits, sandboxed=self.sandboxed)
            self.manager._kernel_spec = spec
            # the sandbox clears the environment anyway; without it nothing else may pass either
            # what it writes past Jupyter could hold anything, a terminal's commands too
            self.manager.start_kernel(
                env={"PATH": "/usr/bin:/bin"},
                cwd=str(self.runtime),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            self.watch = Watch(self._pid(), self.runtime, self.limits)
            self.watch.start()
            self.deadline = time.monotonic() + self.limits.notebook
            self.client = self.manager.blocking_client()
            self.client.start_channels(stdin=False, hb=False)
            self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(Exception):
            self.watch.stop()
        self._kill()
        with contextlib.suppress(Exception):
            self.client.stop_channels()
        with contextlib.suppress(Exception):
            self.manager.cleanup_resources()
        with contextlib.suppress(Exception):
            self.context.destroy(linger=0)
        shutil.rmtree(self.runtime, ignore_errors=True)

    def _pid(self) -> int:
        return self.manager.provisioner.process.pid

    def _alive(self) -> bool:
        process = getattr(self.manager.provisioner, "process", None)
        return process is not None and process.poll() is None

    def _kill(self) -> None:
        import psutil

        from icmllab.course.sandbox import kill_family

        manager = getattr(self, "manager", None)  # starting may have failed before there was one
        process = getattr(getattr(manager, "provisioner", None), "process", None)
        if process is None or process.poll() is not None:
            return
        with contextlib.suppress(psutil.Error):
            top = psutil.Process(process.pid)
            kill_family([*top.children(recursive=True), top])
        with contextlib.suppress(Exception):
            process.wait(10)

    def _end(self, reason: str) -> KernelGone:
        """Stop the kernel for ``reason``, or for the one that the watch had."""
        if self.gone is None:
            self._kill()
            self.watch.stop()
            self.gone = self.watch.reason or reason
        return KernelGone(self.gone)

    def _wait_until_ready(self) -> None:
        last = time.monotonic() + min(60.0, self.limits.notebook)
        # ready means heard on both channels: a subscription takes a moment to arrive, and what
        # the kernel says before that is lost
        answered = heard = False
        asked = 0.0
        while True:
            if time.monotonic() - asked > 2.0 or (answered and not heard):
                self.client.kernel_info()
                asked = time.monotonic()
            with contextlib.suppress(Empty, ValueError):
                self.client.get_shell_msg(timeout=0.1)
                answered = True
            with contextlib.suppress(Empty, ValueError):
                self.client.get_iopub_msg(timeout=0.1 if answered else 0.01)
                heard = True
            if answered and heard:
                return
            if not self._alive():
                raise self._end("the kernel did not start")
            if time.monotonic() > last:
                raise self._end("the kernel did not answer within a minute")

    def run(self, source: str) -> list:
        """Execute one cell of the student's; an exception in it is one of the outputs.

        Returns:
            Outputs as nbformat nodes: streams, errors, plain text and PNG figures.

        Raises:
            KernelGone: the kernel ended or broke a limit; ``partial`` holds the outputs so far.
        """
        outputs: list = []
        try:
            self._request(source, outputs, limit=self.limits.cell, silent=False)
        except TimeoutError as error:
            outputs.append(_error("CellTimeout", str(error)))
        except KernelGone as error:
            error.partial = outputs
            raise
        return outputs

    def ask(self, question: dict, *, limit: float) -> object:
        """The kernel's answer to a question of :mod:`icmllab.course.remote`, as data.

        Args:
            question: what to do; values in it must be data.
            limit: seconds to wait.

        Raises:
            StudentError: the student's code raised; the message is its type and text.
            TimeoutError: no answer in time.
            KernelGone: the kernel ended or broke a limit.
        """
        text = wire.dumps(question)
        code = f"__import__('icmllab.course.remote', fromlist=['answer']).answer({text!r})"
        outputs: list = []
        payload = self._request(code, outputs, limit=limit, silent=False)
        for output in outputs:
            if output.output_type == "error":
                error = _BUILTIN.get(output.ename, StudentError)(output.evalue or output.ename)
                error.add_note("\n".join(output.traceback))
                raise error
        if payload is None:
            raise StudentError("no answer came back")
        try:
            return wire.loads(payload)
        except wire.WireError as error:
            raise StudentError(str(error)) from None

    def _request(self, code: str, outputs: list, *, limit: float, silent: bool) -> str | None:
        """Send code, gather its outputs until the kernel is idle; returns an answer if one came."""
        if self.gone:
            raise KernelGone(self.gone)
        begin = time.monotonic()
        last = min(begin + limit, self.deadline)
        identity = self.client.execute(code, silent=silent, store_history=False, allow_stdin=False)
        received, answer, interrupted = 0, None, False
        replied, quiet = False, 0
        while True:
            now = time.monotonic()
            if now > last:
                if interrupted or now > self.deadline:
                    notebook = now > self.deadline
                    what = (
                        "the notebook ran"
                        if notebook
                        else "a cell ignored its interrupt, having run"
                    )
                    spent = self.limits.notebook if notebook else limit
                    raise self._end(f"{what} longer than {spent:g} s")
                with contextlib.suppress(Exception):
                    self.manager.interrupt_kernel()
                interrupted, last = True, now + 5.0
            try:
                message = self.client.get_iopub_msg(timeout=min(0.25, max(0.01, last - now)))
            except Empty:
                if not self._alive():
                    raise self._end("the kernel ended by itself") from None
                replied = replied or self._replied(identity)
                quiet += 1
                # a flood may have swept the last message away
                if replied and quiet > 8:
                    if interrupted:
                        raise TimeoutError(f"longer than {limit:g} s") from None
                    return answer
                continue
            except Exception as error:  # whatever a forged message makes the reader raise
                raise self._end(
                    f"the kernel sent what is no message ({type(error).__name__})"
                ) from None
            quiet = 0
            if self.watch.reason:
                raise self._end(self.watch.reason)
            parent = message.get("parent_header")
            if not isinstance(parent, dict) or parent.get("msg_id") != identity:
                continue
            kind, content = message.get("msg_type"), message.get("content")
            if not isinstance(content, dict):
                continue
            if kind == "status" and content.get("execution_state") == "idle":
                if interrupted:
                    raise TimeoutError(f"longer than {limit:g} s")
                return answer
            received += _size(content)
            data = content.get("data")
            if (
                kind == "display_data"
                and isinstance(data, dict)
                and isinstance(data.get(MIME), str)
            ):
                # bounded by the size of a message; only one of them counts
                if answer is None:
                    received -= len(data[MIME])
                answer = data[MIME]
            if received > self.limits.output:
                raise self._end(
                    f"more than {self.limits.output // 2**20} MiB of output from one cell"
                )
            output = _clean(kind, content)
            if output is not None:
                _append(outputs, output)

    def _replied(self, identity: str) -> bool:
        """Whether the shell channel brought the reply to a request."""
        try:
            return self.client.get_shell_msg(timeout=0)["parent_header"].get("msg_id") == identity
        except Exception:  # nothing there, or no message
            return False


def _size(content: dict) -> int:
    return (
        len(str(content.get("text", "")))
        + sum(len(v) if isinstance(v, str) else 100 for v in (content.get("data") or {}).values())
        + sum(len(str(line)) for line in content.get("traceback") or ())
        + 50
    )


def _error(name: str, text: str, trace: list[str] | None = None):
    return nbformat.v4.new_output("error", ename=name, evalue=text, traceback=trace or [text])


def _clean(kind: object, content: dict):
    """An output of the few kinds that are kept, every field a string of bounded length; or None."""

    def text(value: object) -> str:
        value = value if isinstance(value, str) else repr(value)
        return value if len(value) <= KEPT_TEXT else value[:KEPT_TEXT] + "\n[cut]"

    if kind == "stream":
        name = "stderr" if content.get("name") == "stderr" else "stdout"
        return nbformat.v4.new_output("stream", name=name, text=text(content.get("text", "")))
    if kind == "error":
        trace = content.get("traceback")
        lines = [text(line) for line in trace[:40]] if isinstance(trace, list) else []
        return _error(text(content.get("ename", "")), text(content.get("evalue", "")), lines)
    if kind in ("display_data", "execute_result"):
        data = content.get("data")
        if not isinstance(data, dict):
            return None
        kept = {"text/plain": text(data["text/plain"])} if "text/plain" in data else {}
        figure = data.get("image/png")
        if isinstance(figure, str) and len(figure) <= KEPT_IMAGE:
            kept["image/png"] = figure
        # always a display: a result could be read as a score
        return nbformat.v4.new_output("display_data", data=kept) if kept else None
    return None


def _append(outputs: list, output) -> None:
    """Add an output; streams join, and the whole stays within bounds."""
    if len(outputs) >= 50:
        return
    last = outputs[-1] if outputs else None
    if (
        output.output_type == "stream"
        and last is not None
        and last.output_type == "stream"
        and last.name == output.name
    ):
        if len(last.text) <= KEPT_TEXT:
            last.text = (last.text + output.text)[: KEPT_TEXT + 10]
        return
    outputs.append(output)

"""Run an assembled notebook: the student's cells in the sandbox, the course's tests out of it.

Tests run in this process. A name that a test uses and the course does not define is the student's:
data is copied over, functions become stand-ins whose calls run in the student's kernel with copies
of the arguments and return copies of the results. So no code of the student's can touch the tests,
what they compare with, or how they report.
"""

import ast
import builtins
import contextlib
import io
import linecache
import signal
import time
import traceback
from typing import NamedTuple

import nbformat
from nbformat import NotebookNode

from icmllab.course import wire
from icmllab.course.assemble import Assembled
from icmllab.course.kernel import KEPT_TEXT, KernelGone, StudentKernel
from icmllab.course.sandbox import Limits


class Executed(NamedTuple):
    """A notebook with outputs, and what a teacher should know about its run."""

    notebook: NotebookNode
    notes: list[str]


class Remote:
    """Stands for an object of the student's: calls and attributes are asked for over there.

    Arguments and results are copies. What is not data comes back as another stand-in.
    """

    def __init__(self, tests: "Tests", handle: wire.Handle):
        self._tests, self._handle = tests, handle

    def __call__(self, *args: object, **kwargs: object) -> object:
        question = {"do": "call", "of": self._handle, "args": args, "kwargs": kwargs}
        return self._tests.ask(question)

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._tests.ask({"do": "attribute", "of": self._handle, "name": name})

    def __repr__(self) -> str:
        return f"<the student's {self._handle.kind}>"


class Tests:
    """The course's side of one notebook: its names, and the way to the student's."""

    def __init__(self, kernel: StudentKernel):
        self.kernel = kernel
        self.names: dict[str, object] = {"__name__": "__main__"}
        self.last = 0.0
        self.count = 0

    def ask(self, question: dict) -> object:
        """An answer of the student's kernel, stand-ins for what is no data."""
        try:
            plain = wire.loads(wire.dumps(question, keep=_as_handle))
        except wire.WireError as error:
            raise TypeError(f"a test may only hand over data: {error}") from None
        found = self.kernel.ask(plain, limit=max(0.5, self.last - time.monotonic()))
        return self._stand_in(found)

    def _stand_in(self, value: object) -> object:
        if isinstance(value, wire.Handle):
            return Remote(self, value)
        if type(value) in (list, tuple):
            return type(value)(self._stand_in(v) for v in value)
        if type(value) is dict:
            return {k: self._stand_in(v) for k, v in value.items()}
        return value

    def run(self, source: str, *, limit: float, test: bool) -> list:
        """Execute one of the course's cells here.

        Args:
            source: its text.
            limit: seconds it may take, the student's share included.
            test: whether names of the student's are to be had.

        Returns:
            Outputs as nbformat nodes; a failed test ends with an error.
        """
        self.count += 1
        file = f"<test {self.count}>"
        # for the lines of a traceback
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        self.last = time.monotonic() + limit
        printed = io.StringIO()
        outputs = []
        theirs: dict[str, object] = {}
        try:
            tree = ast.parse(source, file)
            with _alarm(limit + 10), contextlib.redirect_stdout(printed):
                if test:
                    theirs = self._fetch(tree)
                self.names.update(theirs)
                result = _evaluate(tree, file, self.names)
            if result is not None:
                data = {"text/plain": repr(result)[:KEPT_TEXT]}
                outputs.append(nbformat.v4.new_output("execute_result", data=data))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            outputs.append(_failure(error))
        finally:
            for name in theirs:
                self.names.pop(name, None)
        if printed.getvalue():
            text = printed.getvalue()[:KEPT_TEXT]
            outputs.insert(0, nbformat.v4.new_output("stream", name="stdout", text=text))
        return outputs

    def _fetch(self, tree: ast.Module) -> dict[str, object]:
        """The student's values for the names that the cell uses and the course does not know."""
        used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        wanted = sorted(n for n in used if n not in self.names and not hasattr(builtins, n))
        if not wanted:
            return {}
        found = self.ask({"do": "names", "names": wanted})
        if not isinstance(found, dict):
            raise ValueError("no answer came back")
        return {n: v for n, v in found.items() if n in wanted}


def _as_handle(value: object) -> wire.Handle:
    if isinstance(value, Remote):
        return value._handle
    raise wire.WireError(f"a {type(value).__name__} cannot be sent: only data can")


def _evaluate(tree: ast.Module, file: str, names: dict) -> object:
    """Run a cell's statements; the value of a last expression is its result."""
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        exec(compile(tree, file, "exec"), names)
        return None
    exec(compile(ast.Module(tree.body[:-1], tree.type_ignores), file, "exec"), names)
    return eval(compile(ast.Expression(last.value), file, "eval"), names)


def _failure(error: BaseException):
    """An error as an output: its message and the test's own lines."""
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith("<test")
    ]
    lines = [*traceback.format_list(frames), f"{type(error).__name__}: {error}"]
    for note in getattr(error, "__notes__", ()):
        lines.append(f"\n\nIn the student's code:\n{note}")
    text = "".join(lines)[:KEPT_TEXT]
    return nbformat.v4.new_output(
        "error",
        ename=type(error).__name__,
        evalue=str(error)[:KEPT_TEXT],
        traceback=text.splitlines(),
    )


@contextlib.contextmanager
def _alarm(seconds: float):
    """Raise TimeoutError in the main thread after ``seconds``, where the system has alarms."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"longer than {seconds:g} s")

    if not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def execute(assembled: Assembled, *, limits: Limits, sandboxed: bool = True) -> Executed:
    """Run a notebook from top to bottom; a kernel that ends early fails the tests that follow.

    Args:
        assembled: what :func:`icmllab.course.assemble.assemble` gave; it is not changed.
        limits: what the student's code may use.
        sandboxed: False runs it without walls.

    Raises:
        KernelGone: no kernel could be started: nothing was run.
    """
    nb = nbformat.from_dict(assembled.notebook)
    notes = list(assembled.notes)
    with StudentKernel(limits, sandboxed=sandboxed) as kernel:
        tests = Tests(kernel)
        for number, (cell, role) in enumerate(zip(nb.cells, assembled.roles, strict=True)):
            if role == "text":
                continue
            outputs = []
            if role in ("student", "setup"):
                try:
                    outputs = kernel.run(cell.source)
                except KernelGone as gone:
                    outputs = getattr(gone, "partial", [])
                    note = f"the kernel was stopped: {gone}"
                    if note not in notes:
                        notes.append(note)
                        outputs.append(nbformat.v4.new_output("stream", name="stdout", text=note))
            if role == "setup":
                own = tests.run(cell.source, limit=limits.cell, test=False)
                if any(o.output_type == "error" for o in own):
                    raise RuntimeError(f"a set-up cell of the course fails: {own[-1].evalue}")
            if role == "test":
                outputs = tests.run(cell.source, limit=limits.cell, test=True)
            cell.outputs = outputs
            cell.execution_count = number + 1
            for output in outputs:
                if output.output_type == "execute_result":
                    output.execution_count = number + 1
    return Executed(nb, notes)

"""Inside the student's process: answer the tests' questions about what the student defined.

The tests run elsewhere (:mod:`icmllab.course.execute`). They ask for the value of a name, or for
the result of a call; the answer goes back as data. A student's code can forge answers from here,
but an answer is all that it can forge: whether a test passes is decided in the other process.
"""

from icmllab.course import wire

MIME = "application/vnd.icmllab.answer"
"""Type of the display message that carries an answer."""

_kept: dict[int, object] = {}


def _keep(value: object) -> wire.Handle:
    number = len(_kept)
    _kept[number] = value
    return wire.Handle(number, type(value).__name__, callable(value))


def _fetch(handle: wire.Handle) -> object:
    return _kept[handle.number]


def answer(question: str) -> None:
    """Do what ``question`` asks and publish the answer.

    A question is ``{"do": "names", "names": [...]}``: which of them are defined, and what are
    they; or ``{"do": "call", "of": handle, "args": [...], "kwargs": {...}}``; or
    ``{"do": "attribute", "of": handle, "name": ...}``.
    """
    from IPython import get_ipython

    shell = get_ipython()
    q = wire.loads(question, resolve=_fetch)
    if q["do"] == "names":
        found = {n: shell.user_ns[n] for n in q["names"] if n in shell.user_ns}
    elif q["do"] == "call":
        found = q["of"](*q["args"], **q["kwargs"])
    elif q["do"] == "attribute":
        found = getattr(q["of"], q["name"])
    else:
        raise wire.WireError(f"unknown question {q['do']!r}")
    shell.display_pub.publish(data={MIME: wire.dumps(found, keep=_keep)}, metadata={})

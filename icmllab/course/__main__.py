"""The course's commands: ``python -m icmllab.course <command>``, behind the Makefile's.

Exit codes: 0 all well, 1 something could not be graded or collected, 2 bad arguments or no sandbox.
"""

import argparse
import sys
from pathlib import Path

from icmllab.course.paths import Course


def build_parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    parser = argparse.ArgumentParser(prog="python -m icmllab.course", description=__doc__)
    parser.add_argument("--course", type=Path, default=None, help="folder of the course")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("release", help="write the students' version of a lab")
    one.add_argument("lab", nargs="?", default="")
    one = commands.add_parser("collect-zip", help="take submissions out of an LMS's zip files")
    one.add_argument("lab", nargs="?", default="")
    one.add_argument("--zip", type=Path, action="append", default=[], dest="archives")
    one = commands.add_parser("grade", help="grade the submissions of a lab")
    one.add_argument("lab", nargs="?", default="")
    one.add_argument("--sandbox", choices=["on", "off"], default="on")
    one.add_argument("--workers", type=int, default=None)
    one.add_argument("--again", action="store_true", help="grade all anew")
    one = commands.add_parser("grades", help="write every mark as CSV")
    one.add_argument("--out", type=Path, default=None)
    one = commands.add_parser("sync", help="write the labs' .ipynb from their .md")
    one.add_argument("--check", action="store_true", help="only say which ones differ")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = build_parser().parse_args(argv)
    course = Course(args.course.resolve()) if args.course else Course.default()
    actions = {
        "release": _release,
        "collect-zip": _collect,
        "grade": _grade,
        "grades": _grades,
        "sync": _sync,
    }
    from icmllab.course.sandbox import SandboxError

    try:
        return actions[args.command](course, args)
    except (ValueError, SandboxError) as error:
        print(f"icmllab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("icmllab: stopped; what was graded is kept, run again to go on", file=sys.stderr)
        return 1


def _release(course: Course, args: argparse.Namespace) -> int:
    from icmllab.course.labs import make_release

    path = make_release(course, args.lab)
    print(f"icmllab: the students' version is {_short(course, path)}")
    return 0


def _collect(course: Course, args: argparse.Namespace) -> int:
    from icmllab.course.collect import collect_zip

    archives = args.archives or sorted((course.root / "downloaded" / args.lab).glob("**/*.zip"))
    found = collect_zip(course, args.lab, archives)
    print(f"icmllab: {len(found.taken)} submissions taken, {len(found.same)} were there already")
    for line in found.skipped:
        print(f"icmllab: skipped {line}", file=sys.stderr)
    return 1 if found.skipped else 0


def _grade(course: Course, args: argparse.Namespace) -> int:
    from icmllab.course.grade import grade

    sandboxed = args.sandbox == "on"
    if not sandboxed:
        print(
            "icmllab: WARNING: SANDBOX=off runs students' code with your rights: it can read and "
            "change your files, the marks among them",
            file=sys.stderr,
        )
    marks = grade(course, args.lab, sandboxed=sandboxed, workers=args.workers, again=args.again)
    if not marks:
        print(f"icmllab: nobody has handed in {args.lab}: put notebooks into labs/submitted/")
        return 0
    for status in ("graded", "unreadable", "failed"):
        count = sum(m.status == status for m in marks)
        if count:
            print(f"icmllab: {count} {status}")
    return 1 if any(m.status == "failed" for m in marks) else 0


def _grades(course: Course, args: argparse.Namespace) -> int:
    from icmllab.course.grades import write_csv

    path = args.out or course.root / "grades.csv"
    rows = write_csv(course, path)
    print(f"icmllab: {rows} marks in {_short(course, path)}")
    return 0


def _sync(course: Course, args: argparse.Namespace) -> int:
    from icmllab.course.labs import is_in_step, sync

    labs = sorted(p.stem for p in course.root.glob("source/*/*.md") if p.stem == p.parent.name)
    stale = [lab for lab in labs if not is_in_step(course, lab)]
    for lab in stale:
        print(f"icmllab: labs/source/{lab}: the .md and the .ipynb differ")
        if not args.check:
            sync(course, lab)
    return 1 if stale and args.check else 0


def _short(course: Course, path: Path) -> str:
    """The path as a person in the checkout would write it."""
    above = course.root.parent
    return str(path.relative_to(above) if path.is_relative_to(above) else path)


if __name__ == "__main__":
    sys.exit(main())

"""The command line behind the Makefile: ``python -m icmllab <command>``.

``run``, ``sync``, ``stress`` and ``results`` work on the chapters of a checkout; ``list`` names
them. Exit codes: 0 all well, 1 a claim does not hold or a chapter failed, 2 bad arguments.
"""

import argparse
import sys


def build_parser() -> argparse.ArgumentParser:
    """The command line's grammar."""
    parser = argparse.ArgumentParser(prog="python -m icmllab", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    commands.add_parser("list", help="name the chapters")

    run = commands.add_parser("run", help="execute a chapter and print its claims")
    run.add_argument("chapter", nargs="?", default="")
    run.add_argument("--preset", default="quick")
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--force", action="store_true", help="rewrite even when nothing changed")

    sync = commands.add_parser("sync", help="re-run every chapter whose .ipynb is out of date")
    sync.add_argument("--check", action="store_true", help="only say which ones")

    stress = commands.add_parser("stress", help="a chapter's claims over many seeds")
    stress.add_argument("chapter", nargs="?", default="")
    stress.add_argument("--seeds", type=int, default=20)
    stress.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    stress.add_argument("--workers", type=int, default=None)

    results = commands.add_parser("results", help="compute a chapter's shipped results anew")
    results.add_argument("chapter", nargs="?", default="")
    results.add_argument("--workers", type=int, default=None)

    files = commands.add_parser("chapter-files", help="the tests and pages of one chapter")
    files.add_argument("chapter", nargs="?", default="")

    slides = commands.add_parser("slides", help="reveal.js slides of a chapter")
    slides.add_argument("chapter", nargs="?", default="")

    commands.add_parser("trust", help="mark the book's notebooks as trusted for this user")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = build_parser().parse_args(argv)
    from icmllab.notebook import commands

    action = {
        "list": commands.list_chapters,
        "run": commands.run,
        "sync": commands.sync,
        "stress": commands.stress,
        "results": commands.results,
        "chapter-files": commands.chapter_files,
        "slides": commands.slides,
        "trust": commands.trust,
    }[args.command]
    try:
        return action(args)
    except (ValueError, FileNotFoundError) as error:
        print(f"icmllab: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("icmllab: interrupted; no file was changed", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())

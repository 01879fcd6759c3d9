"""The commands of ``python -m icmllab``: each takes the parsed arguments and gives an exit code."""

import argparse
import difflib
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed

from icmllab.notebook import chapters
from icmllab.notebook.presets import PRESETS


def list_chapters(_: argparse.Namespace) -> int:
    """Name the chapters, one a line."""
    print("\n".join(chapters.chapter_names()))
    return 0


def run(args: argparse.Namespace) -> int:
    """Execute a chapter, print its claims, keep its notebook when it ran to the end."""
    from icmllab.notebook.claims import format_claims

    name = chapters.find_notebook(args.chapter)
    if args.preset not in PRESETS:
        near = difflib.get_close_matches(args.preset, PRESETS, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"PRESET must be quick or full: got {args.preset}{hint}")
    print(f"icmllab: running {name} (preset {args.preset}, seed {args.seed})", flush=True)
    quick = args.preset == "quick"
    try:
        done = chapters.execute(
            name,
            preset=args.preset,
            seed=args.seed,
            timeout=chapters.CELL_TIMEOUT if quick else None,
        )
    except chapters.ChapterError as error:
        print(f"icmllab: {error}\nicmllab: the stored notebook is untouched", file=sys.stderr)
        return 1

    where = chapters.notebook_path(name)
    if quick and args.seed == 0:
        if args.force:
            chapters.write_notebook(where, done.notebook)
            wrote = True
        else:
            wrote = chapters.store(name, done.notebook)
    else:
        where = chapters.root() / ".icmllab" / "runs" / f"{name}.{args.preset}.{args.seed}.ipynb"
        chapters.write_notebook(where, done.notebook)
        wrote = True

    if done.claims:
        print(format_claims(done.claims))
    shown = where.relative_to(chapters.root())
    print(f"{'wrote' if wrote else 'nothing new in'} {shown}")
    print(f"{done.seconds:.1f} s, {done.peak_mb:.0f} MB at the peak")
    return 1 if undeclared_failures(done.claims) else 0


def undeclared_failures(payload: dict | None) -> list[str]:
    """The claims that fail and that the chapter does not declare as failing."""
    claims = payload["claims"] if payload else ()
    return [c["text"] for c in claims if c["verdict"] == "fails" and not c["expected_to_fail"]]


def sync(args: argparse.Namespace) -> int:
    """Re-run every chapter whose notebook half is out of date (``--check``: only say which)."""
    stale = {n: r for n in chapters.notebook_names() if (r := chapters.stale_reason(n))}
    for name, reason in stale.items():
        print(f"{name}: {reason}")
    if not stale:
        print("icmllab: every notebook shows what its source says")
    if args.check:
        return 1 if stale else 0
    failed = [
        name
        for name in stale
        if run(argparse.Namespace(chapter=name, preset="quick", seed=0, force=False))
    ]
    if failed:
        print(f"icmllab: failed or with an undeclared ✗: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _stress_one(name: str, seed: int, threads: int) -> dict:
    """One run of a chapter's experiments, in a process of its own."""
    # several runs share the cores: threads that wait must sleep, not spin
    os.environ.setdefault("GOMP_SPINCOUNT", "0")
    try:
        done = chapters.execute(name, seed=seed, threads=threads)
    except chapters.ChapterError as error:
        return {"seed": seed, "threads": threads, "error": str(error)}
    claims = done.claims["claims"] if done.claims else []
    return {"seed": seed, "threads": threads, "claims": claims, "seconds": done.seconds}


def stress(args: argparse.Namespace) -> int:
    """Run a chapter over seeds and thread counts; print the share in which each claim holds."""
    name = chapters.find_chapter(args.chapter)
    if args.seeds < 1:
        raise ValueError(f"SEEDS must be at least 1: got {args.seeds}")
    if min(args.threads) < 1:
        raise ValueError(f"threads must be at least 1: got {args.threads}")
    cores = os.cpu_count() or 1
    outcomes, begin = [], time.perf_counter()
    print(f"icmllab: {name} over {args.seeds} seeds with {args.threads} threads", flush=True)
    for threads in args.threads:
        workers = args.workers or max(1, cores // threads)
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
            jobs = [pool.submit(_stress_one, name, s, threads) for s in range(args.seeds)]
            for job in as_completed(jobs):
                outcomes.append(job.result())
                print(".", end="", flush=True)
    outcomes.sort(key=lambda o: (o["threads"], o["seed"]))
    print(f" {time.perf_counter() - begin:.0f} s")

    errors = [o for o in outcomes if "error" in o]
    for o in errors:
        print(f"seed {o['seed']}, {o['threads']} threads: {o['error'].splitlines()[0]}")
    table = stress_table([o for o in outcomes if "claims" in o], total=len(outcomes))
    width = max((len(row.text) for row in table), default=10)
    print(f"{'claim':<{width}}  {'criterion':<24}  {'holds':>7}  {'worst':>12}  worst at seed")
    for row in table:
        share = "–" if row.reported else f"{row.held}/{row.total}"
        note = "" if row.enough else f"  ← {row.note}"
        print(
            f"{row.text:<{width}}  {row.criterion:<24}  {share:>7}  {row.worst!s:>12}  "
            f"{row.worst_seed}{note}"
        )
    enough = all(row.enough for row in table) and not errors
    print("every claim holds in at least 19 of 20 runs" if enough else "NOT every claim holds")
    return 0 if enough else 1


class StressRow:
    """How one claim fared over the runs of a stress test."""

    def __init__(self, text: str, entries: list[tuple[int, dict]], total: int):
        self.text = text
        self.total = total
        self.criterion = entries[0][1]["criterion"]
        self.reported = all(e["verdict"] == "reported" for _, e in entries)
        self.declared = any(e["expected_to_fail"] for _, e in entries)
        self.held = sum(e["verdict"] == "holds" for _, e in entries)
        worst = max(entries, key=lambda item: badness(item[1]))
        measured = worst[1]["measured"]
        self.worst = f"{measured:.5g}" if isinstance(measured, float | int) else measured
        self.worst_seed = worst[0]

    @property
    def enough(self) -> bool:
        """Whether the claim's verdict is the same in at least 19 of 20 runs."""
        if self.reported:
            return True
        agreeing = self.total - self.held if self.declared else self.held
        return agreeing >= 0.95 * self.total

    @property
    def note(self) -> str:
        """What is wrong, for a row that is not good enough."""
        return "declared as failing, but holds" if self.declared else "holds too rarely"


def badness(entry: dict) -> float:
    """How far a claim's measured value is from holding; larger is worse, > 0 fails."""
    measured, bounds = entry["measured"], entry.get("bounds")
    if entry["verdict"] == "reported":
        return 0.0
    if not isinstance(measured, float | int) or isinstance(measured, bool) or not bounds:
        return 1.0 if entry["verdict"] == "fails" else -1.0
    low, high = bounds
    return max(
        low - measured if low is not None else float("-inf"),
        measured - high if high is not None else float("-inf"),
    )


def stress_table(outcomes, *, total: int) -> list[StressRow]:
    """One row a claim, in the chapter's order; a run without the claim counts against it."""
    by_text: dict[str, list] = {}
    for outcome in outcomes:
        for entry in outcome["claims"]:
            by_text.setdefault(entry["text"], []).append((outcome["seed"], entry))
    return [StressRow(text, entries, total) for text, entries in by_text.items()]


def results(args: argparse.Namespace) -> int:
    """Compute a chapter's shipped results anew and write its ``.results.csv``."""
    from icmllab.notebook.results import write_results

    name = chapters.find_chapter(args.chapter)
    workers = args.workers or max(1, (os.cpu_count() or 1))
    spawn = multiprocessing.get_context("spawn")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        path = write_results(name, executor=pool)
    print(f"wrote {path.relative_to(chapters.root())}")
    return 0


def chapter_files(args: argparse.Namespace) -> int:
    """Print what proves one chapter: its module's tests, its exercises' tests, its notebook."""
    name = chapters.find_chapter(args.chapter)
    part, slug = name.split("/")
    tests = chapters.root() / "tests"
    wanted = [tests / part / f"test_{slug}.py", *sorted((tests / "book").glob(f"test_{slug}_*.py"))]
    wanted.append(chapters.notebook_path(name))
    missing = [p.relative_to(chapters.root()).as_posix() for p in wanted if not p.is_file()]
    if missing:
        raise FileNotFoundError(f"{name} is not whole: missing {', '.join(missing)}")
    print(" ".join(p.relative_to(chapters.root()).as_posix() for p in wanted))
    return 0


def slides(args: argparse.Namespace) -> int:
    """Write the slides of a chapter from its stored outputs."""
    from icmllab.notebook.slides import write_slides

    name = chapters.find_chapter(args.chapter)
    path = write_slides(name, chapters.read_notebook(name), chapters.root() / "_build" / "slides")
    print(f"icmllab: the slides are {path.relative_to(chapters.root())}")
    return 0


def trust(_: argparse.Namespace) -> int:
    """Sign the book's notebooks, so that JupyterLab shows their HTML outputs before a run."""
    from nbformat.sign import NotebookNotary

    notary = NotebookNotary()
    for name in chapters.notebook_names():
        nb = chapters.read_notebook(name)
        if nb is not None:
            notary.sign(nb)
    return 0

"""A real browser, a served site and a real JupyterLab for the end-to-end tests."""

import functools
import http.server
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def chromium() -> str | None:
    """The Chromium on this machine, or the one that CHROMIUM names."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="session")
def browser():
    executable = chromium()
    if executable is None:
        message = "no Chromium on this machine (Debian, Ubuntu: apt install chromium)"
        if os.environ.get("ICMLLAB_REQUIRE_BROWSER"):
            pytest.fail(message)
        pytest.skip(message)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        instance = playwright.chromium.launch(executable_path=executable, args=CHROMIUM_FLAGS)
        yield instance
        instance.close()


class Watched:
    """A page together with what went wrong on it."""

    def __init__(self, page, origin: str):
        self.page = page
        self.errors: list[str] = []
        self.outside: list[str] = []

        def on_request(request):
            if not request.url.startswith((origin, "data:", "blob:", "about:")):
                self.outside.append(request.url)

        page.on("console", lambda m: self.errors.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: self.errors.append(str(e)))
        page.on("request", on_request)


@pytest.fixture(scope="session")
def site():
    """The address of the built book, served on this machine alone."""
    pages = ROOT / "_build" / "html"
    if not (pages / "index.html").is_file():
        pytest.fail("the book is not built: run 'make book' first")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Quiet, directory=str(pages))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture
def visit(browser, site):
    """Open a page of the site in a context of its own; returns the watched page."""
    contexts = []

    def visit(path: str, **options) -> Watched:
        context = browser.new_context(viewport={"width": 1280, "height": 900}, **options)
        contexts.append(context)
        watched = Watched(context.new_page(), site)
        watched.page.goto(f"{site}/{path}", wait_until="load")
        return watched

    yield visit
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def lab_folder(tmp_path_factory):
    """The folder that JupyterLab shows."""
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="session")
def lab(lab_folder, browser):
    """A JupyterLab over a copy of the book, as ``make lab`` starts it."""
    folder = lab_folder
    shutil.copytree(ROOT / "book", folder / "book")
    for name in ("jupytext.toml", "_toc.yml"):
        shutil.copy(ROOT / name, folder)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {k: v for k, v in os.environ.items() if k != "ICMLLAB_STATIC"}
    env |= {"JUPYTER_RUNTIME_DIR": str(folder / "runtime"), "OMP_NUM_THREADS": "1"}
    env |= {"JUPYTER_CONFIG_DIR": str(folder / "config"), "JUPYTER_DATA_DIR": str(folder / "data")}
    log = (folder / "lab.log").open("w")
    command = [sys.executable, "-m", "jupyter", "lab", "--no-browser", "--allow-root"]
    command += [f"--ServerApp.port={port}", "--ServerApp.port_retries=0"]
    command += [f"--ServerApp.root_dir={folder}", "--IdentityProvider.token="]
    command += ["--LabApp.default_url=/lab/tree/book/index.md", "--expose-app-in-browser"]
    process = subprocess.Popen(
        command,
        env=env,
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(f"{address}/api", timeout=2).close()
            break
        except OSError:
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail("JupyterLab did not start:\n" + (folder / "lab.log").read_text())
            time.sleep(0.3)
    yield address
    process.terminate()
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        process.kill()
    log.close()

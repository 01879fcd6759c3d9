"""A student's lab in JupyterLab: it opens, a cell runs, and Validate says what a grader would."""

import nbformat
import pytest

from icmllab.course.assemble import release
from icmllab.notebook.chapters import root

pytestmark = pytest.mark.browser
SOURCE = root() / "labs" / "source" / "orientation" / "orientation.ipynb"


@pytest.fixture
def page(browser):
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    yield context.new_page()
    context.close()


@pytest.mark.parametrize(("version", "said"), [("released", "cell failed"), ("solved", "Success")])
def test_validate_button(page, lab, lab_folder, version, said):
    nb = release(SOURCE) if version == "released" else nbformat.read(SOURCE, as_version=4)
    nbformat.write(nb, lab_folder / f"{version}.ipynb")
    page.goto(f"{lab}/lab/tree/{version}.ipynb?reset")
    page.wait_for_selector(".jp-NotebookPanel .jp-Notebook .jp-Cell", timeout=60_000)
    page.wait_for_function(
        "() => window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status"
        " === 'idle'",
        timeout=60_000,
    )
    panel = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
    panel.locator("button, jp-button", has_text="Validate").first.click()
    dialog = page.locator(".jp-Dialog")
    dialog.locator(f"text=/{said}/").first.wait_for(timeout=120_000)
    if version == "released":
        assert "NotImplementedError" in dialog.inner_text()
    dialog.locator("button").last.click()

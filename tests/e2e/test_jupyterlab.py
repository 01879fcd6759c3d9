"""A reader's first hour: the start page, a chapter run to its end, a slider moved."""

import pytest

from icmllab.notebook.chapters import chapter_names

pytestmark = pytest.mark.browser

OUTPUTS = """() => {
    const cells = window.jupyterapp.shell.currentWidget.content.widgets;
    return cells.filter(c => c.model.type === 'code').map(c => {
        const outputs = c.model.outputs.toJSON();
        return {
            count: c.model.executionCount,
            state: c.model.executionState,
            errors: outputs.filter(o => o.output_type === 'error').map(o => o.evalue),
            empty: !c.model.sharedModel.getSource().trim(),
        };
    });
}"""


@pytest.fixture
def page(browser):
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    yield context.new_page()
    context.close()


def test_start_page_is_rendered_and_its_links_open_the_notebooks(page, lab):
    page.goto(f"{lab}/")
    page.wait_for_selector("h1:has-text('icmllab')", timeout=60_000)
    page.locator("a", has_text="Does a network agree").first.click()
    page.wait_for_selector(".jp-NotebookPanel .jp-Notebook", timeout=30_000)
    assert page.locator(".lm-TabBar-tab:has-text('aristotelian')").count() == 1


@pytest.mark.parametrize("name", chapter_names())
def test_a_chapter_runs_to_its_end_and_its_slider_redraws(page, lab, name):
    page.goto(f"{lab}/lab/tree/book/{name}.ipynb?reset")
    page.wait_for_selector(".jp-NotebookPanel .jp-Notebook .jp-Cell", timeout=60_000)
    page.wait_for_function(
        "() => window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status"
        " === 'idle'",
        timeout=60_000,
    )
    page.locator(".lm-MenuBar-item:has-text('Run')").click()
    page.locator(".lm-Menu-item:has-text('Run All Cells')").first.click()
    page.wait_for_function(
        f"() => {{ const all = ({OUTPUTS})().filter(c => !c.empty);"
        " return all.some(c => c.errors.length)"
        " || all.every(c => c.count !== null && c.state !== 'running'); }",
        timeout=240_000,
        polling=500,
    )
    page.wait_for_timeout(2000)
    cells = page.evaluate(OUTPUTS)
    assert [c["errors"] for c in cells if c["errors"]] == []
    counts = [c["count"] for c in cells if not c["empty"]]
    assert counts == sorted(counts)

    find = """() => {
        const panel = window.jupyterapp.shell.currentWidget.content;
        const index = panel.widgets.findIndex(c => c.model.type === 'code'
            && c.model.sharedModel.getSource().includes('explore('));
        panel.activeCellIndex = index;
        return panel.scrollToItem(index, 'center').then(() => index);
    }"""
    assert page.evaluate(find) >= 0
    image = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) img.widget-image").first
    image.wait_for(timeout=30_000)
    before = image.get_attribute("src")
    handle = page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .noUi-handle").first
    handle.scroll_into_view_if_needed()
    handle.focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    page.wait_for_function(
        "([el, old]) => el.src !== old", arg=[image.element_handle(), before], timeout=30_000
    )
    # leave nothing unsaved behind: the next test would be asked about it
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")

"""The static book in a real browser: equations, sliders, search, no error, no request outside."""

import pytest

from icmllab.notebook.chapters import chapter_names

pytestmark = pytest.mark.browser

NAMES = chapter_names()
PAGES = [
    "book/index.html",
    "book/papers.html",
    "book/scorecard.html",
    "book/how-to-read.html",
    "book/representations/index.html",
    *(f"book/{name}.html" for name in NAMES),
]


@pytest.mark.parametrize("name", NAMES)
def test_chapter_shows_equations_without_errors_or_requests_outside(visit, name):
    watched = visit(f"book/{name}.html")
    page = watched.page
    page.wait_for_selector("mjx-container", timeout=20_000)
    page.wait_for_timeout(500)
    assert page.locator("mjx-container").count() >= 5
    assert page.locator("mjx-merror").count() == 0
    assert page.locator(".cell_output img").count() >= 3
    broken = "imgs => imgs.filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
    assert page.eval_on_selector_all("img", broken) == []
    assert watched.errors == []
    assert watched.outside == []


@pytest.mark.parametrize("name", NAMES)
def test_slider_changes_the_frame_by_keyboard(visit, name):
    page = visit(f"book/{name}.html").page
    slider = page.locator("article input[type=range]").first
    slider.scroll_into_view_if_needed()
    visible = """el => {
        const box = el.closest('.icmllab-explore');
        return [...box.querySelectorAll('img')].filter(i => i.offsetParent !== null)
            .map(i => i.src).join();
    }"""
    before, said = slider.evaluate(visible), slider.get_attribute("aria-valuetext")
    assert before
    slider.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_timeout(200)
    after = slider.evaluate(visible)
    if after == before:  # it stood at its right end
        page.keyboard.press("ArrowLeft")
        page.wait_for_timeout(200)
        after = slider.evaluate(visible)
    assert after
    assert after != before
    assert slider.get_attribute("aria-valuetext") != said


def test_search_finds_a_word(visit):
    watched = visit("search.html?q=permutation")
    watched.page.wait_for_selector("#search-results li a", timeout=20_000)
    links = watched.page.locator("#search-results li a")
    assert links.count() >= 1
    assert any("aristotelian" in (a.get_attribute("href") or "") for a in links.all())
    assert watched.errors == []


def test_papers_can_be_filtered(visit):
    page = visit("book/papers.html").page
    rows = page.locator("table.icmllab-papers tbody tr")
    assert rows.count() == 76
    page.fill("#icmllab-filter", "gradpower")
    page.wait_for_timeout(100)
    shown = [row for row in rows.all() if row.is_visible()]
    assert len(shown) == 1
    assert "chapter" in shown[0].inner_text()
    page.fill("#icmllab-filter", "in preparation")
    page.wait_for_timeout(100)
    assert len([row for row in rows.all() if row.is_visible()]) == 76 - len(NAMES)


def test_scorecard_counts_what_it_lists(visit):
    page = visit("book/scorecard.html").page
    listed = page.locator("table.icmllab-claims-list .icmllab-verdict").all_inner_texts()
    total = page.locator("table.icmllab-totals tbody tr").last.locator("td").all_inner_texts()
    assert [int(n) for n in total[1:4]] == [
        sum(text.startswith(symbol) for text in listed) for symbol in "✓✗○"
    ]
    assert len(listed) >= 15


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("path", PAGES)
def test_page_has_no_serious_accessibility_violation(visit, path, theme):
    from axe_playwright_python.sync_playwright import Axe

    page = visit(path, color_scheme=theme).page
    page.evaluate("theme => { document.documentElement.dataset.theme = theme }", theme)
    page.wait_for_timeout(300)
    found = Axe().run(page).response["violations"]
    serious = [
        f"{v['id']} ({v['impact']}): {v['nodes'][0]['html'][:300]} (+{len(v['nodes']) - 1})"
        for v in found
        if v["impact"] in ("serious", "critical")
    ]
    assert not serious, "\n".join(serious)


def test_navigation_has_dark_mode_copy_buttons_and_previous_and_next(visit):
    page = visit(f"book/{NAMES[0]}.html").page
    assert page.locator(".theme-switch-button").count() >= 1
    assert page.locator("button.copybtn").count() >= 3
    assert page.locator("a.left-prev").count() == 1
    assert page.locator("a.right-next").count() == 1

// The filter over the list of papers, and keyboard access to what scrolls.
document.addEventListener("DOMContentLoaded", () => {
  const input = document.getElementById("icmllab-filter");
  if (input) {
    const rows = [...document.querySelectorAll("table.icmllab-papers tbody tr")];
    const count = input.parentElement.querySelector("output");
    const apply = () => {
      const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        row.hidden = !words.every((word) => text.includes(word));
        shown += row.hidden ? 0 : 1;
      }
      count.value = `${shown} of ${rows.length}`;
    };
    input.addEventListener("input", apply);
    apply();
  }
  // the theme's fold-out arrows have no name of their own
  for (const arrow of document.querySelectorAll("nav details > summary")) {
    const link = arrow.closest("li")?.querySelector("a");
    arrow.setAttribute("aria-label", `Pages of ${link ? link.textContent.trim() : "this part"}`);
  }
  for (const box of document.querySelectorAll("div.highlight pre, .pst-scrollable-table-container, .cell_output .output")) {
    if (box.scrollWidth > box.clientWidth + 1) {
      box.tabIndex = 0;
    }
  }
});

"""One look for every figure: a colour-blind-safe palette on a ground of its own."""

PALETTE = {
    "blue": "#0072B2",
    "vermillion": "#D55E00",
    "green": "#009E73",
    "purple": "#AA4A86",
    "sky": "#56B4E9",
    "orange": "#E69F00",
    "black": "#222222",
    "grey": "#767676",
}
"""Named colours, after Okabe and Ito, told apart by readers with any colour vision.

Their reddish purple is darker here, so that each of the first four reads as a thin line.
"""

GROUND = "#fbfbf9"
"""What figures are drawn on; light on every page, so that dark text stays readable."""


def unboxed(name: str) -> str:
    """CSS that takes away the light box which the book's theme puts HTML outputs in when dark.

    Args:
        name: the class of the output's own element, which brings colours for both modes.
    """
    return (
        f"html[data-theme=dark] .bd-content div.cell_output .text_html:has(.{name})"
        "{background:none!important;color:inherit!important;padding:0!important}"
        f"html[data-theme=dark] .bd-content div.cell_output .{name} img"
        "{background:none!important;padding:0!important;filter:none!important}"
    )


def use_style() -> None:
    """Set matplotlib up for the book, whatever the reader's own settings are.

    Figures carry a light ground of their own, so that they read alike on light and dark pages.
    """
    import matplotlib as mpl
    from cycler import cycler

    mpl.rcdefaults()  # leaves the backend alone
    mpl.rcParams.update(
        {
            # 704 pixels wide: one column of the book
            "figure.figsize": (6.4, 3.5),
            "figure.dpi": 110,
            "savefig.dpi": 110,
            "figure.constrained_layout.use": True,
            "figure.facecolor": GROUND,
            "axes.facecolor": GROUND,
            "savefig.facecolor": GROUND,
            "axes.prop_cycle": cycler(color=list(PALETTE.values())),
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": "#dddddd",
            "grid.linewidth": 0.6,
            "axes.titlesize": 11,
            "axes.titlelocation": "left",
            "axes.labelsize": 10,
            "font.size": 10,
            "legend.frameon": False,
            "legend.fontsize": 9,
            "lines.linewidth": 1.8,
            "lines.markersize": 5,
            "image.cmap": "cividis",
        }
    )

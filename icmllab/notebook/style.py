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
"""Named colours, after Okabe and Ito, told apart by readers with any colour vision."""


def use_style() -> None:
    """Set matplotlib up for the book, whatever the reader's own settings are.

    Figures carry a light ground of their own, so that they read alike on light and dark pages.
    """
    import matplotlib as mpl
    from cycler import cycler

    backend = mpl.rcParams["backend"]
    mpl.rcdefaults()
    mpl.rcParams["backend"] = backend
    mpl.rcParams.update(
        {
            "figure.figsize": (7.0, 3.6),
            "figure.dpi": 100,
            "savefig.dpi": 100,
            "figure.constrained_layout.use": True,
            "figure.facecolor": "#fbfbf9",
            "axes.facecolor": "#fbfbf9",
            "savefig.facecolor": "#fbfbf9",
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

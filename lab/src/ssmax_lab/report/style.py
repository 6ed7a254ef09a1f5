"""How figures are made and kept."""

from io import BytesIO
from pathlib import Path
from typing import Any

from ssmax._extras import require


def new_figure(width: float = 6.4, height: float = 4.0, *, columns: int = 1, rows: int = 1) -> Any:
    """Make a figure and its axes (a grid of them where there are several), without a screen."""
    require("matplotlib", install="ssmax-lab", purpose="drawing figures")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes if columns * rows > 1 else axes[0, 0]


def as_svg(figure: Any) -> str:
    """Write the figure as text; the same records give the same bytes."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "ssmax", "svg.fonttype": "none"}):
        buffer = BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue().decode()


def save(figure: Any, folder: Path, name: str) -> None:
    """Write the figure as .svg and .png."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.svg").write_text(as_svg(figure))
    figure.savefig(folder / f"{name}.png", dpi=160, metadata={"Software": None})

"""How figures look: a colour and a dash for every configuration, safe for the colour-blind."""

from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from ssmax._extras import require


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """How a configuration is drawn and called."""

    label: str
    colour: str
    dash: str
    """matplotlib's word for the line: colour alone does not tell configurations apart in print."""


# Okabe and Ito's palette, which survives the common kinds of colour blindness.
LOOKS = {
    "a": Look(label="(a) softmax", colour="#000000", dash="-"),
    "b": Look(label="(b) SSMax", colour="#D55E00", dash="-"),
    "c": Look(label="(c) SSMax, no s", colour="#E69F00", dash="--"),
    "d": Look(label="(d) SSMax + bias", colour="#0072B2", dash="--"),
    "e": Look(label="(e) (a), replaced after", colour="#009E73", dash=":"),
    "f": Look(label="(f) (a), replaced late", colour="#CC79A7", dash="-."),
    "temperature": Look(label="control: learned temperature", colour="#56B4E9", dash="-."),
    "mean_log": Look(label="a constant, (c)'s mean", colour="#BDB76B", dash="-."),
    "sqrt_log": Look(label="s sqrt(log n)", colour="#A0522D", dash="--"),
    "polylog": Look(label="polylog", colour="#556B2F", dash="--"),
    "entropy_invariant": Look(label="(a), log n / log L after", colour="#8A2BE2", dash=":"),
    "clamp": Look(label="(a), Qwen log-n after", colour="#B8860B", dash=":"),
    "llama4": Look(label="(a), Llama 4 after", colour="#708090", dash=":"),
    "yarn": Look(label="(a), YaRN temperature after", colour="#B22222", dash=":"),
    "constant": Look(label="(a), a constant after", colour="#2F4F4F", dash=":"),
    "b_held": Look(label="(b), n held after", colour="#FF8C69", dash=":"),
    "c_held": Look(label="(c), n held after", colour="#C0A000", dash=":"),
}


def look(configuration: str) -> Look:
    """Of a configuration by its letter; one that is not the paper's gets a grey line."""
    return LOOKS.get(configuration, Look(label=configuration, colour="#777777", dash="-"))


def labels(runs: Mapping[str, int]) -> dict[str, str]:
    """What configurations are called, with their numbers of runs where these are not the same."""
    found = {name: look(name).label for name in runs}
    if len(set(runs.values())) < 2:
        return found
    return {name: f"{found[name]}, {n} run{'s' * (n > 1)}" for name, n in runs.items()}


def new_figure(width: float = 6.4, height: float = 4.0, *, columns: int = 1, rows: int = 1) -> Any:
    """A figure and its axes (a grid of them where there are several), drawn without a screen."""
    require("matplotlib", install="ssmax-lab", purpose="drawing figures")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes if columns * rows > 1 else axes[0, 0]


def as_svg(figure: Any) -> str:
    """The figure as text; the same records give the same bytes."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "ssmax", "svg.fonttype": "none"}):
        buffer = BytesIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue().decode()


def save(figure: Any, folder: Path, name: str) -> None:
    """As .svg and .png."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.svg").write_text(as_svg(figure))
    figure.savefig(folder / f"{name}.png", dpi=160, metadata={"Software": None})

"""Small trained models that come with the package, so that there is something to try at once.

tiny-a has softmax, tiny-b SSMax; tiny-a-qa and tiny-b-qa are the same, fine-tuned to find a number
that is hidden in a text. Each is a run's folder, as `make tiny` left it: configuration, metrics and
model. runs.json says how they were made.
"""

from pathlib import Path

RUNS = Path(__file__).parent
NAMES = ("tiny-a", "tiny-b", "tiny-a-qa", "tiny-b-qa")
TINY = f"{', '.join(NAMES)}, which come with the package"


def run_folder(run: str | Path) -> Path:
    """Find the folder of a run: as it is given, or that of a run in this package by its name."""
    folder = Path(run)
    return RUNS / folder if str(run) in NAMES and not folder.exists() else folder


def is_shipped(folder: Path) -> bool:
    """Tell whether a run comes with the package."""
    return folder.parent == RUNS

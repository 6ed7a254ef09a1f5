"""Draw results/ anew from its records, and write its tables into the README and the docs.

`make results`. No GPU, no weights: a folder of results holds records, and all else is made of them.
"""

from pathlib import Path

from ssmax._files import write_whole
from ssmax_lab.report.results import (
    BASES,
    read_results,
    shown_figures,
    tables,
    variants_figure,
    written,
)
from ssmax_lab.report.style import as_svg
from ssmax_lab.study.reproduction import report

ROOT = Path(__file__).parent.parent
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("results*.md")))


def main() -> None:
    """Judge, draw, write."""
    for study in sorted((ROOT / "results").glob("*/study.json")):
        _, page = report(study.parent)
        print(page.relative_to(ROOT))
    results = read_results(ROOT / "results")
    for base in BASES:
        drawn = variants_figure(results, base)
        if drawn is not None:
            write_whole(ROOT / "results" / f"variants-of-{base}.svg", as_svg(drawn))
    made = tables(results)
    for document in DOCUMENTS:
        text = written(document.read_text(), made)
        write_whole(document, text)
        # A page of the site shows what lies beside it.
        for picture, figure in shown_figures(text).items():
            write_whole(ROOT / "docs/pictures" / picture, (ROOT / "results" / figure).read_text())


if __name__ == "__main__":
    main()

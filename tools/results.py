"""Draw build/results and docs/pictures from lab/results; write its tables into README and docs.

`make results`. No GPU, no weights: pages, figures and tables are made of records alone.
"""

from pathlib import Path

from ssmax._files import write_whole
from ssmax_lab.report import results_figures
from ssmax_lab.report.results_tables import read_results, recorded, tables, written
from ssmax_lab.report.style import as_svg
from ssmax_lab.study.reproduction import report

ROOT = Path(__file__).parent.parent
RECORDS, DRAWN = ROOT / "lab/results", ROOT / "build/results"
PICTURES = ROOT / "docs/pictures"
SHIPPED = ROOT / "lab/src/ssmax_lab/report/recorded.json"
"""What pages of smaller studies show beside their own."""
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("results*.md")))


def main() -> None:
    """Judge, draw, write."""
    for study in sorted(RECORDS.glob("*/study.json")):
        _, page = report(study.parent, DRAWN / study.parent.name)
        print(page.relative_to(ROOT))
    results = read_results(RECORDS)
    for name, figure in results_figures.every(results).items():
        write_whole(PICTURES / f"{name}.svg", as_svg(figure))
    write_whole(SHIPPED, recorded(results))
    made = tables(results)
    for document in DOCUMENTS:
        write_whole(document, written(document.read_text(), made))


if __name__ == "__main__":
    main()

"""Add to the site what is not in docs/: the explorer, root files, generated pages, KaTeX."""

import base64
import hashlib
import shutil
import subprocess
import tarfile
import tempfile
import textwrap
from collections.abc import Mapping
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

import engines_table
import licences
from ssmax_lab.analysis.findings import Findings
from ssmax_lab.report.page import explorer_page
from ssmax_lab.report.results_tables import read_results, tables

ROOT = Path(__file__).parent.parent
FROM_ROOT = {"changes.md": "CHANGELOG.md", "security.md": "SECURITY.md"}
GENERATED = {"engines-table.md": engines_table.page, "licences.md": licences.page}
"""Pages that are tables, and what writes them."""

STUDIES = "studies"
"""Folder of the appendix within the site."""

FETCHED = ROOT / "build" / "site-assets"
"""Where npm's packages are kept between builds."""
PACKAGES = {
    "katex@0.16.47": (
        "Eeo8Ys1doU1z+x8AZsPpQu+p/QcZBI5PeOo7QGQdy2x2m0MU/hYagBbGOmXwr5KVbEfVuWv9LpnQWeehogurjg==",
        ("dist/katex.min.js", "dist/katex.min.css", "dist/fonts/*.woff2", "LICENSE"),
    ),
    "iframe-worker@1.0.4": (
        "roeaaI+Lg1LJNfgpCjoRe/+WzEjy9+Z08LoEvu85MCPbBjwm+qXz8Ag5U05lHa6V1CysZyGzE0SOkAtSUA5q7Q==",
        ("shim/index.js", "LICENSE"),
    ),
}
"""Packages that the site serves itself: their SHA-512 and the files taken from each."""

OVER_ALL = {
    "claims": "Claims, study by study",
    "retrieval": "Needle retrieval where it can fail",
    "scales": "Initial logit scale, and faster s, at 49 M: loss less (a)'s",
    "computed": "Claims that are computed",
    "RoPE limit": "RoPE limit and where the loss breaks, in tokens",
    "RoPE base scaling": "What a larger RoPE base costs within the training length, in nats",
    "variants of small": "Variants of `small`: (b) less (a)",
    "variants of quick": "Variants of `quick`: (b) less (a)",
}
OF_A_STUDY = {
    "comparisons": "Comparisons",
    "numbers": "Losses and retrieval, mean over runs (least to largest)",
    "stretches": "Loss less (a)'s of the same seed, in nats",
    "needles": "Needle retrieval accuracy (exact match) by context length",
    "first digits": "First digit right, by context length",
    "heads": "Attention sharpness by number of keys",
    "probe": "R^2 of fits to the learned p_n",
}
"""Tables of the appendix and their headings."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add generated and fetched files when mkdocs has listed docs/."""
    files.append(File.generated(config, "explorer.html", content=explorer_page()))
    for page, source in FROM_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for name, write in GENERATED.items():
        files.append(File.generated(config, name, content=write()))
    for name, text in appendix(read_results(ROOT / "lab" / "results")).items():
        files.append(File.generated(config, f"{STUDIES}/{name}.md", content=text))
    for package in PACKAGES:
        folder = fetched(package)
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = f"assets/{package.partition('@')[0]}/{path.relative_to(folder).as_posix()}"
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def appendix(results: Mapping[str, Findings]) -> dict[str, str]:
    """Write one page per study, and one that sets them side by side, without prose."""
    made = tables(results)
    links = [f"- [{name}]({name}.md)" for name in sorted(results)]
    over_all = [f"## {title}\n\n{made[name]}" for name, title in OVER_ALL.items()]
    pages = {"index": "\n\n".join(["# All studies", "\n".join(links), *over_all]) + "\n"}
    for name, findings in results.items():
        parts = [f"# {name}"]
        if findings.commands:
            commands = [
                textwrap.fill(one, 96, subsequent_indent="    ", break_on_hyphens=False)
                for one in findings.commands
            ]
            parts.append("```text\n" + "\n".join(commands) + "\n```")
        for table, title in OF_A_STUDY.items():
            text = made[f"{name} {table}"]
            if text.startswith("|"):
                parts.append(f"## {title}\n\n{text}")
        pages[name] = "\n\n".join(parts) + "\n"
    return pages


def fetched(package: str) -> Path:
    """Return the folder with a package's files, fetched by npm and checked on the first build."""
    folder = FETCHED / package
    if folder.exists():
        return folder
    if shutil.which("npm") is None:
        raise PluginError(f"the site needs {package}, and npm to fetch it: install Node.js")
    checksum, wanted = PACKAGES[package]
    FETCHED.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FETCHED) as name:
        place = Path(name)
        subprocess.run(["npm", "pack", "--silent", package], cwd=place, check=True)
        (archive,) = place.glob("*.tgz")
        digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        if digest != checksum:
            raise PluginError(f"{package}: expected SHA-512 {checksum}, got {digest}")
        with tarfile.open(archive) as file:
            file.extractall(place, filter="data")
        chosen = place / "chosen"
        for pattern in wanted:
            for path in (place / "package").glob(pattern):
                inside = path.relative_to(place / "package").as_posix()
                target = chosen / inside.removeprefix("dist/")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target)
        chosen.rename(folder)
    return folder

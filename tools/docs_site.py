"""What the site holds besides docs/: the explorer of the page, and files of the root."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from ssmax_lab.report.page import explorer_page

ROOT = Path(__file__).parent.parent
FROM_ROOT = {"changes.md": "CHANGELOG.md", "security.md": "SECURITY.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by mkdocs when it has listed docs/."""
    files.append(File.generated(config, "explorer.html", content=explorer_page()))
    for page, source in FROM_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files

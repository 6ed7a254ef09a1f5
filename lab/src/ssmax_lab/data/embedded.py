"""The default corpus: the sources of Python's own standard library, where Python is installed.

It needs no download, and it is the same wherever the same patch version of Python is.
"""

import hashlib
import os
import platform
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from ssmax.errors import UsageError
from ssmax_lab.data.documents import Document, Part

_LEFT_OUT = re.compile(
    r"__pycache__|site-packages|dist-packages|tests?|idle_test"
    # What describes the machine rather than the language.
    r"|config-.*|_sysconfigdata.*|sitecustomize\.py|usercustomize\.py"
)
_INDENTATION = re.compile(r"^(?: {4})+", re.MULTILINE)


class EmbeddedPart(Part):
    """The whole corpus."""

    __slots__ = ()

    def documents(self) -> Iterator[Document]:
        """Its files."""
        return embedded_documents()


def embedded_part() -> EmbeddedPart:
    """The corpus as a part of a source, named by its version."""
    size = sum(len(document.text.encode()) for document in embedded_documents())
    return EmbeddedPart(name=f"embedded {embedded_version()}", size=size)


def embedded_documents() -> Iterator[Document]:
    """The standard library's modules by relative path, four spaces of indentation as one tab."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(_modules(root), key=lambda path: path.relative_to(root).as_posix())
    if not paths:
        raise UsageError(
            f"this Python comes without the sources of its standard library: {root} holds none; "
            "give a text of your own"
        )
    for path in paths:
        text = path.read_text(encoding="utf-8")
        # Tabs make of every level of indentation one token of GPT-2 instead of four.
        folded = _INDENTATION.sub(lambda spaces: "\t" * (len(spaces[0]) // 4), text)
        if folded.strip():
            yield Document(path.relative_to(root).as_posix(), folded)


def embedded_version() -> str:
    """The version of Python and a hash of the corpus: "3.11.7-0123456789ab"."""
    digest = hashlib.sha256()
    for document in embedded_documents():
        digest.update(f"{document.name}\0{document.text}\0".encode())
    return f"{platform.python_version()}-{digest.hexdigest()[:12]}"


def _modules(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not _LEFT_OUT.fullmatch(name)]
        for name in files:
            if name.endswith(".py") and not _LEFT_OUT.fullmatch(name):
                yield Path(folder, name)

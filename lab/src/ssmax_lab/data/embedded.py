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


def embedded_part() -> Part:
    """Make a part of the whole corpus, named by its version."""
    size = sum(len(document.text.encode()) for document in embedded_documents())
    return Part(name=f"embedded {embedded_version()}", size=size, read=embedded_documents)


def embedded_documents() -> Iterator[Document]:
    """Read the standard library's modules by relative path, four spaces of indentation as a tab."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not _LEFT_OUT.fullmatch(name)]
        found += [
            Path(folder, name).relative_to(root).as_posix()
            for name in files
            if name.endswith(".py") and not _LEFT_OUT.fullmatch(name)
        ]
    if not found:
        raise UsageError(
            f"this Python comes without the sources of its standard library: {root} holds none; "
            "give a text of your own"
        )
    for name in sorted(found):
        text = (root / name).read_text(encoding="utf-8")
        # Tabs make of every level of indentation one token of GPT-2 instead of four.
        folded = _INDENTATION.sub(lambda spaces: "\t" * (len(spaces[0]) // 4), text)
        if folded.strip():
            yield Document(name, folded)


def embedded_version() -> str:
    """Name the version of Python and a hash of the corpus: "3.11.7-0123456789ab"."""
    digest = hashlib.sha256()
    for document in embedded_documents():
        digest.update(f"{document.name}\0{document.text}\0".encode())
    return f"{platform.python_version()}-{digest.hexdigest()[:12]}"

"""A converted model in a form that other engines run.

Names are loaded on first use, and with them what they need.
"""

from typing import TYPE_CHECKING

from ssmax._lazy import door

if TYPE_CHECKING:
    from ssmax.export.exporting import export as export
    from ssmax.export.graphs import graph_of as graph_of
else:
    __all__, __getattr__, __dir__ = door(__name__)

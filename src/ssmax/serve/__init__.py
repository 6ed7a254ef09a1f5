"""A trained model in the engines that people already run, or behind OpenAI's endpoint.

Names are loaded on first use, and with them what they need.
"""

from typing import TYPE_CHECKING

from ssmax._lazy import door

if TYPE_CHECKING:
    from ssmax.serve.endpoint import Limits as Limits
    from ssmax.serve.endpoint import application as application
    from ssmax.serve.engine import Engine as Engine
    from ssmax.serve.exporting import export as export
    from ssmax.serve.graphs import graph_of as graph_of
    from ssmax.serve.language import plain_language as plain_language
    from ssmax.serve.language import transformers_language as transformers_language

_HOME_OF = {
    "Engine": "engine",
    "Limits": "endpoint",
    "application": "endpoint",
    "export": "exporting",
    "graph_of": "graphs",
    "plain_language": "language",
    "transformers_language": "language",
}

__all__ = [
    "Engine",
    "Limits",
    "application",
    "export",
    "graph_of",
    "plain_language",
    "transformers_language",
]


if not TYPE_CHECKING:
    __getattr__, __dir__ = door(__name__, _HOME_OF)

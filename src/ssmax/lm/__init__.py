"""The paper's language model: configuration, model, generation, checkpoints.

Names are loaded on first use.
"""

from typing import TYPE_CHECKING

from ssmax._lazy import door

if TYPE_CHECKING:
    from ssmax.lm.checkpoint import load_lm as load_lm
    from ssmax.lm.checkpoint import save_lm as save_lm
    from ssmax.lm.config import LMConfig as LMConfig
    from ssmax.lm.llama import from_llama_weights as from_llama_weights
    from ssmax.lm.llama import to_llama_weights as to_llama_weights
    from ssmax.lm.model import LM as LM

_HOME_OF = {
    "LM": "model",
    "LMConfig": "config",
    "from_llama_weights": "llama",
    "load_lm": "checkpoint",
    "save_lm": "checkpoint",
    "to_llama_weights": "llama",
}

__all__ = [
    "LM",
    "LMConfig",
    "from_llama_weights",
    "load_lm",
    "save_lm",
    "to_llama_weights",
]


if not TYPE_CHECKING:
    __getattr__, __dir__ = door(__name__, _HOME_OF)

"""The paper's language model: configuration, model, generation, checkpoints.

Names are loaded on first use.
"""

from typing import TYPE_CHECKING

from ssmax._lazy import door

if TYPE_CHECKING:
    from ssmax_lab.model.config import LMConfig as LMConfig
    from ssmax_lab.model.llama import to_llama_weights as to_llama_weights
    from ssmax_lab.model.model import LM as LM
    from ssmax_lab.model.model import load_lm as load_lm
    from ssmax_lab.model.model import save_lm as save_lm
else:
    __all__, __getattr__, __dir__ = door(__name__)

"""The paper's language model: configuration, model, generation, checkpoints."""

from ssmax.lm.checkpoint import load_lm, save_lm
from ssmax.lm.config import LMConfig
from ssmax.lm.llama import from_llama_weights, to_llama_weights
from ssmax.lm.model import LM

__all__ = ["LM", "LMConfig", "from_llama_weights", "load_lm", "save_lm", "to_llama_weights"]

"""Scalable-Softmax in any Hugging Face model: convert, extend, verify, train, save, load.

Names are loaded on first use, and Transformers with them.
"""

from typing import TYPE_CHECKING

from ssmax._lazy import door

if TYPE_CHECKING:
    from ssmax.hf.adapter import load as load
    from ssmax.hf.adapter import save as save
    from ssmax.hf.conversion import convert as convert
    from ssmax.hf.extension import extend as extend
    from ssmax.hf.extension import revert as revert
    from ssmax.hf.full_checkpoint import from_pretrained as from_pretrained
    from ssmax.hf.remote_code import save_remote_code as save_remote_code
    from ssmax.hf.training import anneal as anneal
    from ssmax.hf.training import freeze_all_but_ssmax as freeze_all_but_ssmax
    from ssmax.hf.training import param_groups as param_groups
    from ssmax.hf.verification import verify as verify
else:
    __all__, __getattr__, __dir__ = door(__name__)

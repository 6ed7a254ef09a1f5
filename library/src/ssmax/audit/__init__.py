"""Is the attention temperature of a checkpoint applied by the engines that run it?

Names are loaded on first use, and with them what they need.
"""

from typing import TYPE_CHECKING

from ssmax._lazy import door

if TYPE_CHECKING:
    from ssmax.audit.auditing import Audit as Audit
    from ssmax.audit.auditing import audit as audit
    from ssmax.audit.judging import Verdict as Verdict
    from ssmax.audit.small import write_small as write_small
else:
    __all__, __getattr__, __dir__ = door(__name__)

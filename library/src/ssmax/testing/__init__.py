"""A kit that checks whether an attention counts n right: the oracle, the cases and the laws.

>>> from ssmax.testing import check_attention
>>> print(check_attention(my_attention))  # doctest: +SKIP

Nothing here imports the operations that it judges.
"""

from ssmax.testing.budget import assert_no_worse_than
from ssmax.testing.cases import Case, SplitCase, named_cases, split_cases
from ssmax.testing.check import Outcome, Report, check_attention
from ssmax.testing.laws import LAWS, check_laws
from ssmax.testing.oracle import naive_attention, oracle_attention, oracle_mask
from ssmax.testing.watch import LargestTensor

__all__ = [
    "LAWS",
    "Case",
    "LargestTensor",
    "Outcome",
    "Report",
    "SplitCase",
    "assert_no_worse_than",
    "check_attention",
    "check_laws",
    "naive_attention",
    "named_cases",
    "oracle_attention",
    "oracle_mask",
    "split_cases",
]

"""The laboratory: the paper's model, data, training, evaluation, study and report."""

import logging

__version__ = "0.1.0"
# Silent until somebody configures the logging.
logging.getLogger(__name__).addHandler(logging.NullHandler())

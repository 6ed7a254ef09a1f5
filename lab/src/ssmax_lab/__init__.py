"""The laboratory: the paper's model, data, training, evaluation, study and report."""

__version__ = "0.1.0"

"""Rotate q and k and multiply q by its factor, in one pass over memory."""

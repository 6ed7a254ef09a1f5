"""Figures, tables and the page, drawn from records alone; no torch."""

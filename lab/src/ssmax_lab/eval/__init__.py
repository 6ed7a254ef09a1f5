"""What the paper measures, on any model that can answer three questions."""

"""Train runs from tokens: one loop, on one machine or many, that nothing interrupts for good."""

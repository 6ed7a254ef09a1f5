"""The paper as a plan: what is compared, and what came of it."""

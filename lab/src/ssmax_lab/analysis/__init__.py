"""What records say: findings of a study, statistics, fits and formulas. Without torch."""

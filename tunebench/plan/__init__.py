"""Plans of a training step, made from predicted times."""

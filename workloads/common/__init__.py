"""What several operators share, by topic: bases of operators, activations, prologues and error bounds."""

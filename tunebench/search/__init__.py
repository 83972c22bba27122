"""Which configuration next: Optuna samplers over valid configurations, and the ask/tell loop."""

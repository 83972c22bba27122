"""Runners: verification and timing of compiled configurations, in a worker process."""

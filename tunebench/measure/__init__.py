"""Runs compiled configurations: proves them right, then times them, in a process of its own."""

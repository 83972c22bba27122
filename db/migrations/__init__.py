"""Steps from one schema revision to the next, run by `tunebench.db.upgrade`."""

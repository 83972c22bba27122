"""Schema migrations, run by `tunebench.db.upgrade` and `tunebench.db.downgrade`."""

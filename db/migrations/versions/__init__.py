"""One migration per file, `NNNN_topic.py`; released migrations never change."""

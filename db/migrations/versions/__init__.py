"""One step a file, `NNNN_what.py`; a step that was released is never changed."""

"""Replacement of the modules of a torch model by served ones."""

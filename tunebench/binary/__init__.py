"""Inspection of compiled code: contents of cubins, disassembly, occupancy."""

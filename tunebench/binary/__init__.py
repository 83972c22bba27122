"""Inspection of compiled code: cubin contents, disassembly, occupancy."""

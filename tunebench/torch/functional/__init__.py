"""Functions of `torch.nn.functional` run by tuned kernels, one module each.

`custom_op` registers kernels with torch and dispatches calls to them.
"""

"""The `tunebench` backend of `torch.compile`.

`capture` traces a model's step, `translation` reads the trace as a `tunebench.graph.Graph`, `backend` plans
its groups, and `_graph_rewriter` replaces each group by one call of tuned kernels. `timing` compares the
result with eager torch and `torch.compile`. `saving` keeps compiled models in files.
"""

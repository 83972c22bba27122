"""Co-execution: a training step's Python runs as it is, and its operations are recorded as a graph.

- `coexecute`: a decorator and context manager for a whole iteration
- `coexecute.report`: what happened in its iterations
- `trace_graph`: the merged traces of all iterations

Source: Kim et al., Terra: Imperative-Symbolic Co-Execution of Imperative Deep Learning Programs,
NeurIPS 2021.
"""

from tunebench.training._torch import require_torch

require_torch()

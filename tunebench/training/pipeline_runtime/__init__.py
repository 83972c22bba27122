"""Training steps of a model that is split into pipeline stages, in the order that a schedule lists.

- `pipelined_model`: a model on all ranks of a process group, by one call
- `layers`: layers between which a model can be divided: children of `Sequential`, or traced operations
- `partition`: division of layers into stages, as measured
- `pipelined_stages`: the stages of this process in the schedule of a process group, ready to run steps
- `runtime`: execution of the actions of a rank
- `stage`: forward and backward passes of one stage, with only the memory that a schedule accounts for
- `saved_activations`: tensors that autograd saves, which can be evicted to another rank and loaded back
- `transfer`: sends and receives between ranks, and the failure of ranks
- `measurement`: costs of stages and links, measured in the processes that run them
"""

from tunebench.training._torch import require_torch

require_torch()

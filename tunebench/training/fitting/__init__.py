"""Training steps that run within a memory budget: profile, plan, and execution of the plan.

- `profile`: operations, tensors and times of a model's step as a `tunebench.training.memory.TrainingStep`
- `fit`: a model whose training steps run as planned
"""

from tunebench.training._torch import require_torch

require_torch()

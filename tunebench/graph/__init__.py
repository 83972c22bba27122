"""From a model to kernels: what a step computes, which operations share a kernel, and what that takes.

`extract` reads a PyTorch model as a `Graph`, `plan` chooses the groups that it runs in on a device, and
`tunebench.torch.compile` runs them. Only `extract` needs torch.
"""

from tunebench.graph.extraction import InputSpec, extract, load_factory, make_model, suite_of
from tunebench.graph.group import Group, groups
from tunebench.graph.node import Graph, Node, Operand, Value
from tunebench.graph.partition import Candidate, Partition, cheapest_partition
from tunebench.graph.plan import Offer, Plan, plan
from tunebench.graph.price import Price, Prices

__all__ = [
    "Candidate",
    "Graph",
    "Group",
    "InputSpec",
    "Node",
    "Offer",
    "Operand",
    "Partition",
    "Plan",
    "Price",
    "Prices",
    "Value",
    "cheapest_partition",
    "extract",
    "groups",
    "load_factory",
    "make_model",
    "plan",
    "suite_of",
]

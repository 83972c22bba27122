"""A model's step as a graph of operations, and its partition into groups that share a kernel.

`extract` reads a PyTorch model as a `Graph`, `plan_partition` chooses the groups for a device, and
`tunebench.torch.compile` runs them. Only `extract` needs torch.
"""

from tunebench._deprecation import renamed
from tunebench.graph.extraction import (
    InputSpec,
    extract,
    extract_onnx,
    load_factory,
    make_model,
    suite_of,
)
from tunebench.graph.group import FusedGroup, groups
from tunebench.graph.node import Graph, Node, NodeOperand, Value
from tunebench.graph.partition import Partition, PartitionCandidate, cheapest_partition
from tunebench.graph.partition_plan import PartitionPlan, PricedGroup, plan_partition
from tunebench.graph.price import Price, Prices

__all__ = [
    "FusedGroup",
    "Graph",
    "InputSpec",
    "Node",
    "NodeOperand",
    "Partition",
    "PartitionCandidate",
    "PartitionPlan",
    "Price",
    "PricedGroup",
    "Prices",
    "Value",
    "cheapest_partition",
    "extract",
    "extract_onnx",
    "groups",
    "load_factory",
    "make_model",
    "plan_partition",
    "suite_of",
]

__getattr__ = renamed(
    __name__,
    {
        "Candidate": "PartitionCandidate",
        "Group": "FusedGroup",
        "Offer": "PricedGroup",
        "Operand": "NodeOperand",
        "Plan": "PartitionPlan",
        "plan": "plan_partition",
    },
)
